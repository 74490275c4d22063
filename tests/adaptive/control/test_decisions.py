"""What hooks and scripts ask for after a step is requested, entered in the digest, and reported."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import adaptive as ad
from adaptive.base.decision import Decision, Limits
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.decisions import Decisions, apply_decision
from adaptive.control.hooks import HookOutcome, TakenStep
from adaptive.control.membership import Membership
from adaptive.control.requests import Request
from adaptive.runtime.local_world import LocalWorld

STEP = TakenStep(7, 0.5, ((6, 6), (6, 6)), (0, 1))


class World(LocalWorld):
    """The world of the second process; `first` is the decision of the first one."""

    def __init__(self, first=None):
        super().__init__(4, workers=2)
        self.first, self.gathered = first, 0

    def all_gather_bytes(self, value, about="", more=""):
        self.gathered += 1
        return [pickle.dumps(self.first), value]


class Hooks:
    """Hooks that have this outcome after each step."""

    def __init__(self, decision, names=("grow",)):
        requests = () if decision is None else tuple(Request(name, 7, decision) for name in names)
        self.outcome = HookOutcome(decision, list(names), requests)

    def run(self, *given):
        return self.outcome


def decisions_of(hooks, world=None, heterogeneous=False):
    world, limits = world or World(), Limits((1,) * 4, (20,) * 4)
    sizes = BatchSizes(12, None, limits, quantum=1, members=world.members)
    asked = []
    hyperparameters = SimpleNamespace(
        request=asked.append, values={"rate": 0.5}, types={"rate": np.dtype("float32")}, asked=asked
    )
    parts = sizes, Membership(world), hyperparameters, DecisionDigest()
    return Decisions(world, "program", hooks, *parts, heterogeneous=heterogeneous), *parts


def test_a_decision_is_requested_and_entered():
    asked = Decision(16, stop=True, notes=("more",), workers=3, hyperparameters={"rate": 0.1})
    hooks = Hooks(asked)
    decisions, sizes, membership, hyperparameters, digest = decisions_of(hooks)
    assert decisions.last == ""
    decision, notes = decisions.after_step(STEP, [])
    assert (decision, notes) == (asked, ["more"])
    assert (sum(sizes.target), membership.target, decisions.stopped) == (16, 3, True)
    assert hyperparameters.asked == [{"rate": 0.1}]
    assert decisions.last_asked == (("grow",), hooks.outcome.requests)
    assert (digest.step, decisions.last) == (7, digest.last)
    assert "hook 'grow' asked for rescale(workers=3, global_batch=16)" in digest.last


def test_a_run_that_the_script_ends_in_a_hook_ends_whatever_hooks_decide():
    decisions, *_ = decisions_of(Hooks(Decision(16)))
    decisions.stop_by_hand(6)
    decisions.after_step(STEP, [])
    assert decisions.stopped


@pytest.mark.parametrize("names", [(), ("quiet",)])
def test_without_a_decision_nothing_changes(names):
    hooks = Hooks(None, names)
    decisions, sizes, _, hyperparameters, digest = decisions_of(hooks)
    assert decisions.after_step(STEP, []) == (None, [])
    assert (sum(sizes.target), hyperparameters.asked, digest.value) == (12, [], 1)
    assert digest.step == (7 if names else 0)


def test_on_machines_of_several_kinds_the_first_process_decides():
    homogeneous, *_, expected = decisions_of(Hooks(Decision(20)))
    homogeneous.after_step(STEP, [])
    for own in (Decision(19), None):
        world = World(Decision(20))
        decisions, sizes, *_, digest = decisions_of(Hooks(own), world, heterogeneous=True)
        decision, _ = decisions.after_step(STEP, [])
        assert (decision.global_batch, sum(sizes.target), digest.value) == (20, 20, expected.value)
    decisions, sizes, *_ = decisions_of(Hooks(Decision(19)), World(None), heterogeneous=True)
    assert decisions.after_step(STEP, []) == (None, [])
    assert sum(sizes.target) == 12
    world = World(Decision(20))
    decisions_of(Hooks(None, ()), world, heterogeneous=True)[0].after_step(STEP, [])
    assert world.gathered == 0, "no hook was due"


def test_a_note_on_sizes_names_the_hook_that_asked_for_them():
    _, sizes, membership, *_ = decisions_of(Hooks(None))
    requests = [Request("few", 7, Decision(workers=1)), Request("much", 7, Decision(99))]
    (note,) = apply_decision(Decision(99, workers=1), sizes, membership, requests)
    assert note.startswith("hook 'much': global batch 99 clipped to 40")


def test_by_hand_a_request_is_exact_for_the_workers_to_come():
    decisions, sizes, membership, _, digest = decisions_of(Hooks(None))
    with pytest.raises(ad.BatchSizeError, match="more than the maximum of the 2 workers, 40"):
        decisions.by_hand(3, 50, None, None)
    assert (digest.step, membership.target) == (0, 2)
    decisions.by_hand(3, 50, None, 3)  # three workers can have it
    assert (membership.target, sizes.wanted, digest.step) == (3, 50, 3)
    assert sum(sizes.target) == 40
    assert "program.rescale asked for rescale(workers=3, global_batch=50)" in digest.last
    with pytest.raises(ad.WorkerCountError):
        decisions.by_hand(4, None, None, 5)


def test_hyperparameters_set_by_hand_are_checked_and_entered():
    decisions, _, _, hyperparameters, digest = decisions_of(Hooks(None))
    decisions.set_by_hand(3, {"rate": 0.25})
    assert hyperparameters.asked == [{"rate": 0.25}]
    assert (digest.step, digest.last) == (3, "program.set_hyperparameters asked for set_hyperparameters(rate=0.25)")
    with pytest.raises(ad.DriverError, match="no hyperparameter 'momentum'"):
        decisions.set_by_hand(4, {"momentum": 1.0})
    assert digest.step == 3
