"""What a program tells of each step, to whoever listens.

    def watch(event):
        print(event.report.step, event.report.seconds, event.hooks[0].values)

    with program.subscribe(watch):
        ...

What is told is local: each process tells its own listeners, and where nobody listens nothing is made. A listener is
beside the point of a run: one that raises is told no more, with a warning in the log "adaptive" and a note in this
process's report, and the run goes on, here and on the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from adaptive.base.activity import WorkerSeconds
from adaptive.base.arrays import is_key
from adaptive.base.decision import Limits
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.causes import Cause, Request
from adaptive.control.hooks import Hooks
from adaptive.control.membership import Membership, Numbers

from .report import Report

_log = logging.getLogger("adaptive")


@dataclass(frozen=True)
class HookValues:
    """What one hook was given in a step.

    Attributes:
      name: of the hook, with its number in the driver: "0/adapt_batch_size". Replicated.
      every: at which steps it decides. Replicated.
      names: of the leaves: "noise.scale". By the function's parameters, or by what the policy says that it reads.
        Replicated.
    """

    name: str
    every: int
    names: tuple[str, ...]
    _leaves: list[jax.Array] = field(repr=False)

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The leaves, by their names. Empty where the step was skipped. Copied from the device when first asked for,
        which waits for the step. Replicated.
        """
        return {name: np.asarray(leaf) for name, leaf in zip(self.names, self._leaves, strict=False)}

    def leaves(self, places: Sequence[int]) -> list[np.ndarray]:
        """Some of the leaves, by their numbers; none where the step was skipped. The others stay on the device."""
        return [np.asarray(self._leaves[place]) for place in places] if self._leaves else []


def hook_values(hooks: Hooks, leaves: Sequence[list[jax.Array]]) -> tuple[HookValues, ...]:
    """What hooks were given in a step; nothing where there are no leaves, since it was skipped."""
    named = zip(hooks.names, hooks.hooks, leaves or [[]] * len(hooks.names), strict=True)
    return tuple(HookValues(name, hook.every, hook.leaf_names, values) for name, hook, values in named)


class Asked(NamedTuple):
    """What had been asked for before the hooks of a step were run: what the first of them is shown."""

    global_batch: int  # of the next step
    active: tuple[int, ...]  # the workers that are to take examples in it
    workers: Numbers
    by: tuple[Cause, ...] = ()  # who asked for batch sizes that are not in force yet

    @classmethod
    def so_far(cls, sizes: BatchSizes, membership: Membership) -> Asked:
        """Of what is to come by now."""
        bounds = sizes.bounds()
        total = bounds.nearest(sum(sizes.target))
        return cls(total, bounds.active, membership.numbers, sizes.waiting_causes)


@dataclass(frozen=True)
class StepEvent:
    """One step, as those see it who listen to a program.

    Attributes:
      report: what the program's user gets, with the decision, sizes, seconds and notes.
      epoch: epochs of data consumed, as a fraction. Replicated.
      previous_batch_sizes: of the step before: seconds that hooks are given are of that one. Replicated.
      limits: what the step's sizes keep. Replicated.
      seed: the program's. Replicated.
      hooks: what each was given, in the order of the driver.
      asked: what had been asked for when the hooks were run. Replicated.
      decided: the names of the hooks behind the report's decision. Replicated.
      workers: seconds of every worker in this step; zeros where a step has no message. Replicated.
      requests: what each hook asked for after this step. Replicated.
      causes: why this step's batch sizes are not those of the step before; empty where they are. Replicated.
      run_id: identifies the run: `program.run_id`. Replicated.
      restored: whether the program was restored since the step before. Steps that follow the restored one are taken
        again: there is an event for each time. Replicated.
    """

    report: Report
    epoch: float
    previous_batch_sizes: tuple[int, ...]
    limits: Limits
    seed: int
    hooks: tuple[HookValues, ...]
    asked: Asked
    decided: tuple[str, ...]
    workers: WorkerSeconds
    requests: tuple[Request, ...] = ()
    causes: tuple[Cause, ...] = ()
    run_id: str = ""
    restored: bool = False

    @cached_property
    def scalars(self) -> dict[str, float]:
        """The driver's metrics that are single numbers, by name: "loss", "noise.scale". Of an object with `compute()`,
        such as the metrics of flax, clu and metrax, the numbers that it returns. Copied from the device on the first
        access, which waits for the step. Replicated.
        """
        nodes, tree = jax.tree.flatten(self.report.metrics, is_leaf=_computes)
        found: dict[str, float] = {}
        for name, node in zip(_names(tree), nodes, strict=True):
            found.update(_computed(name, node) if _computes(node) else _number(name, node))
        return found


def _computes(node: Any) -> bool:
    """Whether a node of the metrics is an object from which its value is computed, such as `nnx.metrics.Accuracy`."""
    return not isinstance(node, type) and callable(getattr(node, "compute", None))


def _computed(name: str, metric: Any) -> dict[str, float]:
    """The numbers that `metric.compute()` returns; those that it keeps, where it cannot be computed on the host."""
    on_host = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), metric)
    try:
        with np.errstate(all="ignore"):  # of no examples it is 0 / 0
            result = on_host.compute()
    except Exception:  # of whatever library the metric is
        result = metric
    leaves, tree = jax.tree.flatten(result)
    numbers: dict[str, float] = {}
    for within, leaf in zip(_names(tree), leaves, strict=True):
        numbers.update(_number(".".join(filter(None, (name, within))), leaf))
    return numbers


def _number(name: str, x: Any) -> dict[str, float]:
    """A leaf by its name, if it is a single real number."""
    if getattr(x, "ndim", 0) or is_key(x):
        return {}
    number = np.asarray(x).item()  # by numpy: `float` of a JAX array takes ten times as long
    return {name: float(number)} if isinstance(number, int | float) else {}


@lru_cache(maxsize=64)
def _names(tree: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
    """Of the leaves: "noise.scale"."""
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return tuple(keystr(path, simple=True, separator=".") for path, _ in paths)


Listener = Callable[[StepEvent], Any]
"""`listener(event)`, called after each step, in the thread of the steps. It must communicate with no other process."""


class Unsubscribe(Exception):
    """Raised by a listener that is to be told no more; its text is the note on it, if there is any."""


class Subscription:
    """Ends with `close()`, or with its `with` block."""

    def __init__(self, listeners: Listeners, listener: Listener):
        self._listeners, self._listener = listeners, listener

    def close(self) -> None:
        """Tell the listener no more."""
        self._listeners.remove(self)

    def tell(self, event: StepEvent) -> None:
        """Call the listener."""
        self._listener(event)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"listener {getattr(self._listener, '__name__', type(self._listener).__name__)!r}"


class Listeners:
    """Those of one program, in this process.

    Attributes:
      any: whether there is one.
    """

    def __init__(self) -> None:
        self._all: tuple[Subscription, ...] = ()
        self.any = False

    def add(self, listener: Listener) -> Subscription:
        new = Subscription(self, listener)
        self._all, self.any = (*self._all, new), True
        return new

    def remove(self, subscription: Subscription) -> None:
        self._all = tuple(s for s in self._all if s is not subscription)
        self.any = bool(self._all)

    def tell(self, event: StepEvent) -> list[str]:
        """Tell all of them.

        Returns:
          Notes on those that are told no more.
        """
        notes = []
        for subscription in self._all:
            try:
                subscription.tell(event)
            except Exception as error:
                self.remove(subscription)
                expected = isinstance(error, Unsubscribe)
                why = str(error) if expected else f"{subscription} failed, and is told no more: {error!r}"
                if why:
                    notes.append(why)
                    _log.warning("%s", why, exc_info=not expected)
        return notes
