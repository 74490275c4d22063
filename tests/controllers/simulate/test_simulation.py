"""The simulated cluster: observations of policies, clock, noise, and the best split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import adaptive as ad
import controllers as ctrl
from adaptive.base.errors import BatchSizeError
from controllers.simulate import Hooked, scenario, simulate
from controllers.simulate._cluster import (
    Cluster,
    by_step,
    jitter,
    stages,
    waves,
)
from controllers.simulate._line_up import LINE_UP, hooked

AFFINE = ctrl.timing.BatchTime(np.array([1e-3, 2e-3, 4e-3]), np.array([0.01, 0.02, 0.0]))


def scripted(decisions=None, seen=None):
    """A policy that requests what is listed by step, and records its observations."""

    def update(observation, state):
        if seen is not None:
            seen.append(observation)
        return (decisions or {}).get(observation.step), state

    return ctrl.Policy(lambda n: (), update, "scripted")


# --- observations of policies -----------------------------------------------------------------------------------------


def test_seconds_are_those_of_the_step_before_and_so_are_the_sizes_they_belong_to():
    seen = []
    policy = scripted({2: ad.Decision(shares=(5.0, 3.0, 4.0))}, seen)
    simulation = simulate(policy, Cluster(AFFINE), [4, 4, 4], 5)
    assert simulation.sizes.tolist() == [[4, 4, 4]] * 2 + [[5, 3, 4]] * 3
    assert np.isnan(seen[0].values[0]).all()
    for step, observation in enumerate(seen[1:], 2):
        assert observation.step == step
        assert observation.batch_sizes == tuple(simulation.sizes[step - 1])
        assert observation.previous_batch_sizes == tuple(simulation.sizes[step - 2])
        np.testing.assert_array_equal(observation.values[0], AFFINE(simulation.sizes[step - 2]))


def test_sizes_are_in_force_in_the_next_step():
    asked = {2: ad.Decision(shares=(5.0, 3.0, 4.0)), 9: ad.Decision(global_batch=15)}
    simulation = simulate(scripted(asked), Cluster(AFFINE), [4, 4, 4], 14)
    assert simulation.changes.tolist() == [2, 9]  # indices: of the steps 3 and 10


def test_a_quantum_that_is_not_given_follows_the_batch():
    seen = []
    policy = scripted({2: ad.Decision(global_batch=1200, shares=(1.0, 2.0, 3.0))}, seen)
    simulation = simulate(policy, Cluster(AFFINE, quantum=None), 12, 4)
    assert [o.limits.quantum for o in seen] == [1, 1, 16, 16]
    assert all(size % 16 == 0 for size in simulation.sizes[-1])


def test_a_split_is_decided_for_the_global_batch_that_an_earlier_hook_asks_for():
    seen = []
    hooks = [Hooked(ctrl.schedule({0: 12, 3: 24}), ()), Hooked(scripted({3: ad.Decision(shares=(8, 8, 8))}, seen))]
    simulation = simulate(hooks, Cluster(AFFINE), [6, 3, 3], 5)
    assert [o.global_batch for o in seen] == [12, 12, 24, 24, 24]
    assert simulation.sizes.tolist() == [[6, 3, 3]] * 3 + [[8, 8, 8]] * 2
    assert simulation.global_batch.tolist() == [12, 12, 12, 24, 24]


def test_the_machine_is_measured_now():
    free = np.array([[1.0, 1.0], [0.5, 1.0], [0.25, 1.0]])
    seen = []
    cluster = Cluster(
        ctrl.timing.BatchTime(np.ones(2)), by_step(1 / free), memory=by_step(1e6 * free), noise_scale=lambda e: e
    )
    reads = ("cpu_available", "memory_available", "noise_scale", "iteration_seconds", "capacities")
    simulate([Hooked(scripted(seen=seen), reads)], cluster, 8, 3)
    for k, observation in enumerate(seen):
        cpu, memory, noise, iteration, capacities = observation.values
        np.testing.assert_allclose(cpu, free[k])
        np.testing.assert_allclose(memory, 1e6 * free[k])
        assert noise.scale == 8 * (k + 1)
        assert noise.lower < noise.scale < noise.upper
        np.testing.assert_allclose(capacities, [1, 1])
        np.testing.assert_allclose(iteration, [np.nan, 4, 8][k])


def test_a_value_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"unknown value 'speed'; the known ones are seconds, .*noise_scale"):
        simulate([Hooked(scripted(), ("speed",))], Cluster(AFFINE), 12, 1)
    with pytest.raises(ad.DriverError, match="one time per worker"):
        simulate([Hooked(ctrl.balance(), ("iteration_seconds",))], Cluster(AFFINE), 12, 1)


def test_the_number_of_workers_is_required():
    with pytest.raises(ValueError, match="the number of workers is unknown"):
        simulate(scripted(), lambda step, sizes: sizes, 12, 1)
    with pytest.raises(ValueError, match="2 initial sizes for 3 workers"):
        simulate(scripted(), Cluster(AFFINE), [4, 4], 1)
    assert simulate(scripted(), lambda step, sizes: sizes, np.array([4, 5]), 1).sizes.tolist() == [[4, 5]]
    assert simulate(scripted(), Cluster(AFFINE), np.int64(12), 1).sizes.tolist() == [[4, 4, 4]]


# --- limits, requests -------------------------------------------------------------------------------------------------


def test_limits_of_workers_are_kept():
    cluster = Cluster(AFFINE, lower=2, upper=np.array([4, 6, 99]))
    simulation = simulate(scripted({1: ad.Decision(shares=(50.0, 50.0, 1.0))}), cluster, 12, 3)
    assert simulation.sizes[-1].tolist() == [4, 6, 2]
    with pytest.raises(BatchSizeError):
        simulate(scripted({1: ad.Decision(shares=(np.nan, 1.0, 1.0))}), cluster, 12, 2)


def test_sizes_are_multiples_of_the_quantum_once_they_are_asked_for():
    simulation = simulate(scripted({1: ad.Decision(shares=(3.0, 2.0, 1.0))}), Cluster(AFFINE, quantum=4), 24, 2)
    assert simulation.sizes.tolist() == [[8, 8, 8], [12, 8, 4]]


def test_workers_join_and_leave_and_joining_ones_have_no_measurements():
    seen, known, seconds = [], [], []

    def update(observation, state):
        state = {"steps": state["steps"] + (np.asarray(observation.batch_sizes) > 0), "all": state["all"] + 1}
        seen.append(state["steps"].tolist())
        seconds.append(observation.values[0])
        known.append((observation.members, observation.joined, observation.limits.active))
        return script.get(observation.step), state

    script = {2: ad.Decision(shares=(6.0, 3.0, 0.0))}
    policy = ctrl.Policy(lambda n: {"steps": np.zeros(n), "all": np.zeros(())}, update)
    present = {1: (1, 1, 0), 4: (0, 1, 1), 6: (1, 1, 1)}
    here = [np.array(present[max(k for k in present if k <= step)], bool) for step in range(1, 8)]
    simulation = simulate(policy, Cluster(AFFINE, present=lambda step: here[step - 1]), 9, 7)
    assert seen == [[1, 1, 0], [2, 2, 0], [3, 3, 0], [3, 4, 1], [3, 5, 2], [1, 6, 3], [2, 7, 4]]
    assert known[2:6] == [
        ((0, 1), (), (0, 1)),
        ((1, 2), (2,), (1, 2)),
        ((1, 2), (), (1, 2)),
        ((0, 1, 2), (0,), (0, 1, 2)),
    ]
    assert simulation.sizes.tolist() == [[5, 4, 0]] * 2 + [[6, 3, 0], *[[0, 5, 4]] * 2, *[[3, 3, 3]] * 2]
    np.testing.assert_array_equal(np.isnan(seconds[1:]), simulation.sizes[:-1] == 0)
    assert ((simulation.seconds > 0) == (simulation.sizes > 0)).all()
    assert simulation.ideal_sizes.sum(axis=1).tolist() == [9] * 7
    assert ((simulation.ideal_sizes == 0) | (simulation.sizes > 0)).all()
    assert simulation.adjustments.tolist() == [2]


# --- clock, noise, ideal ----------------------------------------------------------------------------------------------


def test_the_clock_counts_the_slowest_worker_and_the_overhead():
    simulation = simulate(scripted(), Cluster(AFFINE, overhead=0.5), 12, 4)
    assert simulation.step_seconds.tolist() == pytest.approx([0.528] * 4)
    assert simulation.starts.tolist() == pytest.approx([0.0, 0.528, 1.056, 1.584])
    assert simulation.total_seconds == pytest.approx(2.112)
    assert simulation.seconds_to(18) == pytest.approx(0.792)
    assert np.isnan(simulation.seconds_to(49))


def test_a_trace_may_follow_the_clock():
    trace = lambda step, clock: np.where(clock % 10 < 5, 3.0, 1.0)  # noqa: E731
    slow = simulate(scripted(), Cluster(ctrl.timing.BatchTime(np.full(2, 1.0)), trace), 2, 5)
    assert slow.slowdown.tolist() == [[3, 3], [3, 3], [1, 1], [1, 1], [1, 1]]  # at 0, 3, 6, 7, 8 seconds


def test_traces():
    two = stages({0: 1.0, 3: (1, 5)}, 2)
    assert [two(step, 0.0).tolist() for step in (1, 2, 3, 9)] == [[1, 1], [1, 1], [1, 5], [1, 5]]
    np.testing.assert_allclose(waves(0.4, 8, np.array([0.0, 0.5]))(2, 0.0), np.exp([0.4, -0.4]))
    with pytest.raises(ValueError, match="for step 0"):
        stages({5: 1.0}, 2)


def test_noise_does_not_depend_on_the_policy():
    cluster = Cluster(AFFINE, noise=jitter(0.2))
    one = simulate(scripted(), cluster, 12, 30, jitter=0.1, seed=4)
    other = simulate(scripted({3: ad.Decision(shares=(1.0, 2.0, 3.0))}), cluster, 12, 30, jitter=0.1, seed=4)
    np.testing.assert_array_equal(one.noise, other.noise)
    np.testing.assert_allclose(one.seconds, cluster.times(one.sizes) * one.noise)
    assert (one.sizes != other.sizes).any()
    assert (simulate(scripted(), cluster, 12, 30, jitter=0.1, seed=5).noise != one.noise).any()


def test_the_ideal_is_the_best_of_all_splits_at_the_speed_of_each_step():
    cluster = Cluster(AFFINE, stages({0: 1.0, 3: (1, 1, 3)}, 3), overhead=0.001, upper=np.array([7, 99, 99]))
    simulation = simulate(scripted(), cluster, 12, 4, jitter=0.0)
    for k in range(4):
        slow = cluster.slowdown(k + 1, 0.0)
        splits = (np.array(s) for s in itertools.product(range(1, 8), range(1, 11), range(1, 11)) if sum(s) == 12)
        best = min((AFFINE(split) * slow).max() for split in splits)
        assert simulation.ideal_seconds[k] == pytest.approx(best + 0.001)
        assert simulation.over_ideal[k] == pytest.approx(simulation.step_seconds[k] / (best + 0.001))


def test_the_ideal_of_a_function_is_not_known():
    simulation = simulate(scripted(), lambda step, sizes: sizes * 1.0, [4, 4], 2)
    with pytest.raises(ValueError, match="Cluster"):
        simulation.ideal_seconds  # noqa: B018


def test_many_workers():
    rng = np.random.default_rng(0)
    times = ctrl.timing.BatchTime(1 / rng.uniform(1e3, 4e3, 4096), np.full(4096, 0.01))
    simulation = simulate(ctrl.balance(), Cluster(times, noise=jitter(0.05)), 4096 * 32, 40, every=10)
    assert (simulation.sizes.sum(axis=1) == 4096 * 32).all()
    assert simulation.over_ideal[-1] < 0.7 * simulation.over_ideal[0]


# --- workers who come and go ------------------------------------------------------------------------------------------


def asking(script):
    """A policy that requests numbers of workers, by step."""

    def update(observation, state):
        return (ad.Decision(**script[observation.step]) if observation.step in script else None), state

    return ctrl.Policy(lambda n: (), update, "asking")


EQUAL = ctrl.timing.BatchTime(np.full(4, 1e-3))


def test_workers_join_some_steps_after_they_were_asked_for_and_leave_at_once():
    cluster = Cluster(EQUAL, first=2, join_after=3, upper=10)
    script = {2: {"workers": 4, "global_batch": 36}, 9: {"workers": 1, "global_batch": 6}}
    simulation = simulate(asking(script), cluster, 12, 12)
    assert simulation.workers.tolist() == [2] * 5 + [4] * 4 + [1] * 3
    assert simulation.global_batch.tolist() == [12] * 2 + [20] * 3 + [36] * 4 + [6] * 3
    assert simulation.sizes[-1].tolist() == [6, 0, 0, 0]
    assert simulation.worker_seconds == pytest.approx(float((simulation.workers * simulation.step_seconds).sum()))


@pytest.mark.parametrize(("respawn", "after"), [(False, [3, 3, 2, 2, 2, 2]), (True, [3, 3, 2, 2, 3, 3])])
def test_a_lost_worker_is_replaced_from_the_reserve_if_requested(respawn, after):
    def present(step):
        return np.array([True, step < 3, True, True])

    cluster = Cluster(EQUAL, first=3, join_after=1, present=present, respawn=respawn)
    simulation = simulate(asking({}), cluster, 12, 6)
    assert simulation.workers.tolist() == after
    assert simulation.members[-1].tolist() == [True, False, True, respawn]


def test_a_returning_worker_waits_in_the_reserve():
    def present(step):
        return np.array([True, not 2 <= step < 4])

    two = ctrl.timing.BatchTime(np.full(2, 1e-3))
    with_reserve = Cluster(two, first=2, present=present)
    assert simulate(asking({6: {"workers": 2}}), with_reserve, 12, 8).workers.tolist() == [2, 1, 1, 1, 1, 1, 2, 2]
    without = Cluster(two, present=present)
    assert simulate(asking({}), without, 12, 5).workers.tolist() == [2, 1, 1, 2, 2]


def test_the_exchange_may_go_with_the_number_of_workers():
    cluster = Cluster(EQUAL, first=1, overhead=lambda workers: 0.01 * workers)
    simulation = simulate(asking({1: {"workers": 3}}), cluster, 12, 3)
    assert simulation.step_seconds.tolist() == pytest.approx([0.022, 0.034, 0.034])
    assert np.isnan(simulation.goodput)


@pytest.mark.parametrize("first", [0, 5, 1.5])
def test_a_number_of_workers_that_cannot_be_is_refused(first):
    with pytest.raises(ValueError, match="workers="):
        simulate(asking({}), Cluster(EQUAL, first=first), 12, 3)


def test_a_cluster_without_workers_is_refused():
    for last in (0, 2):
        gone = Cluster(EQUAL, first=1, present=lambda step, last=last: np.full(4, step <= last))
        with pytest.raises(ValueError, match=r"all workers are lost|has no workers"):
            simulate(asking({}), gone, 12, 4)


# --- scenarios and policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step_change", "drift", "contention", "spot", "scaling"])
def test_every_scenario_runs_and_is_the_same_again(name):
    workers = 3
    case = scenario(name, workers, 40, seed=1)
    assert case.about
    runs = [
        simulate([*c.before, hooked("balance@5")], c.cluster, c.global_batch, 40, seed=2)
        for c in (case, scenario(name, workers, 40, seed=1))
    ]
    np.testing.assert_array_equal(runs[0].sizes, runs[1].sizes)
    np.testing.assert_array_equal(runs[0].seconds, runs[1].seconds)
    assert np.isfinite(runs[0].step_seconds).all()
    assert (runs[0].step_seconds > 0).all()
    assert (runs[0].over_ideal >= 1 - 1e-9).all()
    assert (runs[0].sizes <= np.asarray(case.cluster.upper)).all()


@pytest.mark.parametrize("name", LINE_UP)
def test_every_policy_runs(name):
    adapts = LINE_UP[name].adapts
    case = scenario("scaling" if adapts in ("batch", "workers") else "contention", 4, 60)
    first = case.global_batch // 4 if adapts == "batch" else case.global_batch
    simulation = simulate([hooked(name)], case.cluster, first, 60)
    if adapts == "workers":
        assert simulation.workers[-1] > simulation.workers[0]
    elif adapts == "batch":
        assert simulation.global_batch[-1] > simulation.global_batch[0]
    else:
        assert len(simulation.adjustments) or name == "equal"
        assert (simulation.global_batch == case.global_batch).all()


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no scenario is called 'nothing'; known are step_change, "):
        scenario("nothing")
    with pytest.raises(ValueError, match="at least 2 workers"):
        scenario("drift", 1)
    with pytest.raises(ValueError, match="no policy is called 'best'; known are equal, balance"):
        hooked("best")
    with pytest.raises(ValueError, match="after @"):
        hooked("balance@often")
