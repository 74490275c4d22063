"""`mitigate_slow_workers`: balance, then a swap with the reserve, then the end, by what a slow worker has cost."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

import controllers as ctrl
from controllers.policies.mitigate_slow_workers import _lost  # what a hook adds up and does not show
from controllers.simulate import Cluster, Hooked, jitter, scenario, simulate, stages
from tests.mpirun import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # as it is for a script
importlib.import_module("_scenarios")  # adds scenarios

N, SLOW, AT, STEPS = 4, 1, 100, 220


def run(factor=3.0, reserve=1, every=5, fixed=0.03, until=None, **options):
    capacity = N + reserve
    hit = {0: 1.0, AT: np.where(np.arange(capacity) == SLOW, factor, 1.0)}
    trace = stages(hit if until is None else {**hit, until: 1.0}, capacity)
    times = ctrl.timing.BatchTime(np.full(capacity, 1e-3), np.full(capacity, fixed))
    cluster = Cluster(times, trace, jitter(0.05), first=N, join_after=2)
    hook = Hooked(ctrl.mitigate_slow_workers(**options), ("seconds",), every)
    return simulate([hook], cluster, 64 * N, STEPS, seed=3)


def notes(simulation):
    return [(step, note) for step, decision in simulation.decisions for note in decision.notes]


def workers(simulation):
    return [(step, decision.workers) for step, decision in simulation.decisions if decision.workers is not None]


def test_what_a_slow_worker_costs_is_waiting_and_its_lost_speed():
    """Of 64 examples 64 / 48 s with the speeds of now, and 1 s if the second worker were twice as fast again."""
    sizes, seconds = np.array([32, 32]), np.array([1.0, 2.0])
    lost = _lost(sizes, seconds, np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    np.testing.assert_allclose(lost, [0.0, 3 * (1.0 + 64 / 48 - 1.0)])


def test_a_slow_worker_is_replaced_by_the_reserve_and_keeps_what_it_can_do_in_time():
    simulation = run(factor=2.0, every=1, reserve=2)
    assert 0 < simulation.sizes[-1][SLOW] < 32
    assert len(workers(simulation)) == 1
    assert np.median(simulation.step_seconds[-30:]) < 1.1 * np.median(simulation.step_seconds[:AT])


def test_a_slow_worker_that_others_wait_for_with_any_batch_is_drained():
    simulation = run(factor=4.0, fixed=0.128)
    ((asked, number),) = workers(simulation)
    assert number == N + 1
    assert AT < asked <= AT + 30
    texts = [note for _, note in notes(simulation)]
    assert any(note.startswith(f"worker {SLOW} takes ") and "times as long as before" in note for note in texts)
    assert any(note.startswith(f"worker {SLOW} has cost ") and "of the reserve joins" in note for note in texts)
    assert any(note.startswith(f"worker {SLOW} drained") for note in texts)
    assert simulation.sizes[-1].tolist()[SLOW] == 0
    assert (np.delete(simulation.sizes[-1], SLOW) > 0).all()
    assert simulation.global_batch[-1] == 64 * N
    np.testing.assert_allclose(
        np.median(simulation.step_seconds[-30:]), np.median(simulation.step_seconds[:AT]), rtol=0.1
    )


def test_a_dear_swap_waits_until_the_loss_exceeds_it():
    cheap, dear, never = (workers(run(swap_seconds=seconds)) for seconds in (0.1, 2.0, 1e6))
    assert cheap[0][0] < dear[0][0]
    assert never == []


def test_a_worker_that_recovers_in_time_is_not_replaced():
    simulation = run(until=AT + 20, swap_seconds=20.0)
    assert workers(simulation) == []
    assert simulation.sizes[-1][SLOW] > 0


def test_without_a_reserve_the_worker_is_balanced():
    simulation = run(reserve=0)
    assert workers(simulation) == []
    assert simulation.sizes[-1][SLOW] < 64
    assert not any(decision.stop for _, decision in simulation.decisions)


def test_without_a_reserve_the_run_ends_when_that_is_cheaper():
    simulation = run(reserve=0, end_seconds=1.0)
    stops = [step for step, decision in simulation.decisions if decision.stop]
    assert stops[0] > AT
    assert any("more than a restart (1 s): the run ends" in note for _, note in notes(simulation))


@pytest.mark.parametrize(("name", "seed"), [("affine", 2), ("growing", 0), ("knees", 0), ("noisy", 1)])
def test_changes_of_batch_sizes_are_not_taken_for_slow_workers(name, seed):
    case = scenario(name, 8, 300, seed)
    policy, said = ctrl.mitigate_slow_workers(), []

    def update(observation, state):
        decision, state = policy.update(observation, state)
        said.extend(decision.notes if decision else ())
        return decision, state

    hooks = [*case.before, Hooked(policy._replace(update=update), ("seconds",))]
    simulation = simulate(hooks, case.cluster, case.global_batch, 300, seed=seed)
    assert len(simulation.changes) > 0
    assert [note for note in said if "times as long as before" in note] == []


@pytest.mark.parametrize("options", [{"swap_seconds": -1.0}, {"end_seconds": -1.0}])
def test_negative_costs_are_refused(options):
    with pytest.raises(ValueError, match="must not be negative"):
        ctrl.mitigate_slow_workers(**options)
