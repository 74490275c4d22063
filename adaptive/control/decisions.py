"""Decisions after a step: runs the hooks, ensures that all processes decide the same, and applies the decision."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from adaptive.base.decision import Decision
from adaptive.base.world import World
from adaptive.operators.hyperparameters import checked_hyperparameters

from .batch_sizes import BatchSizes
from .decision_digest import DecisionDigest
from .hooks import Hooks, TakenStep
from .hyperparameters import Hyperparameters
from .membership import Membership
from .requests import Request, hooks_in_words


class Decisions:
    """Decisions of one program. Replicated.

    Args:
      heterogeneous: whether results may differ between processes in their last bits, so that the first one decides.

    Attributes:
      stopped: whether a hook or the script has ended the run.
      last_asked: names of the hooks that made the last decision, and the request of each.
      by_script: requests of the script since the last step.
    """

    TRANSFERRED = ("stopped",)  # what a joining process takes over from the others

    def __init__(
        self,
        world: World,
        name: str,
        hooks: Hooks,
        sizes: BatchSizes,
        membership: Membership,
        hyperparameters: Hyperparameters,
        digest: DecisionDigest,
        *,
        heterogeneous: bool,
    ):
        self._world, self._name, self._hooks, self._sizes = world, name, hooks, sizes
        self._membership, self._digest, self._heterogeneous = membership, digest, heterogeneous
        self._hyperparameters = hyperparameters
        self.stopped = False
        self.last_asked: tuple[tuple[str, ...], tuple[Request, ...]] = (), ()
        self.by_script: list[Request] = []

    @property
    def last(self) -> str:
        """Description of the last requests; "" before any hook ran."""
        return self._digest.last if self._digest.step else ""

    def after_step(self, taken: TakenStep, values: Sequence[list[jax.Array]]) -> tuple[Decision | None, list[str]]:
        """Run the hooks that are due, and request the changes that they ask for. Return the merged decision, or `None`,
        and notes on it. Arguments as of `Hooks.run`. May communicate.
        """
        step = taken.step
        decision, names, requests = self._hooks.run(taken, values, self._sizes)
        if names and self._heterogeneous:
            about = f"decision {step} of {self._name}"
            decision = pickle.loads(self._world.all_gather_bytes(pickle.dumps(decision), about)[0])
        if names:
            self._digest.enter(step, hooks_in_words(names), decision)
        if decision is None:
            return None, []
        self.stopped, self.last_asked = self.stopped or decision.stop, (tuple(names), requests)
        self._hyperparameters.request(decision.hyperparameters)
        notes = [*decision.notes, *apply_decision(decision, self._sizes, self._membership, requests)]
        return decision, notes

    def by_hand(self, step: int, global_batch: Any, shares: Any, workers: Any) -> None:
        """Apply the request of `Program.rescale` after `step`; errors as there."""
        members = self._membership
        number = None if workers is None else members.exactly(workers)
        coming = members.target if number is None else number
        slots = members.expected(coming) if coming != len(self._world.members) else None
        decision = replace(self._sizes.exactly(global_batch, shares, slots), workers=number)
        apply_decision(decision, self._sizes, members)
        self.by_script.append(Request("program.rescale", step, decision, hook=False))
        self._digest.enter(step, "program.rescale", decision)

    def set_by_hand(self, step: int, values: Mapping[str, Any]) -> None:
        """Apply the request of `Program.set_hyperparameters` after `step`; errors as there."""
        there = self._hyperparameters
        decision = Decision(hyperparameters=checked_hyperparameters(there.values, values, there.types))
        self._hyperparameters.request(decision.hyperparameters)
        self._digest.enter(step, "program.set_hyperparameters", decision)
        self.by_script.append(Request("program.set_hyperparameters", step, decision, hook=False))

    def stop_by_hand(self, step: int) -> None:
        """Apply the request of `Program.stop` after `step`."""
        self.stopped = True
        self._digest.enter(step, "program.stop", Decision(stop=True))


def apply_decision(
    decision: Decision, sizes: BatchSizes, membership: Membership, requests: Sequence[Request] = ()
) -> list[str]:
    """Request a decision's batch sizes and number of workers; return notes on requests that were changed to possible
    ones. `requests`: those that the decision was merged from.
    """
    notes, by = [], [request for request in requests if request.hook]
    if decision.workers is not None:
        notes = membership.request(decision.workers, [r.by for r in by if r.decision.workers is not None])
    sized = [r.by for r in by if not (r.decision.global_batch is None and r.decision.shares is None)]
    return notes + sizes.request(decision, sized, for_others=membership.pending)
