"""`balance` on simulated clusters: how fast it gets to the best split, and that it then stays there."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from adaptive.base.decision import Limits
from controllers.simulate import Cluster, Hooked, jitter, simulate, waves
from tests.controllers.observations import observe


def over_ideal(times: ctrl.timing.BatchTime, sizes: np.ndarray) -> float:
    """How much longer than with the best split a step takes."""
    best = ctrl.timing.allocate(int(sizes.sum()), times, 1, int(sizes.sum()))
    return times(sizes).max() / times(best).max()


def scaled(times: ctrl.timing.BatchTime, factor: np.ndarray) -> ctrl.timing.BatchTime:
    return ctrl.timing.BatchTime(times.slope * factor, times.intercept * factor)


def after_two_adjustments(seed: int, intercept: float) -> tuple[int, float]:
    """How often the split changed after a worker's speed did; how long steps are with what two changes made."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 9))
    before = ctrl.timing.BatchTime(1 / rng.uniform(1e3, 3e3, n), rng.uniform(0, intercept, n))
    after = scaled(before, np.where(np.arange(n) == rng.integers(n), rng.choice([0.5, 1.5, 2.0, 3.0]), 1.0))
    change = int(rng.integers(200, 211))

    def times(step, sizes):
        return (before if step < change else after)(sizes)

    sim = simulate(ctrl.balance(), times, [128] * n, 320, every=10, jitter=0.05, seed=seed)
    adjustments = [step for step in sim.changes if step >= change]
    settled = min([*adjustments[2:], 320]) - 1
    return len(adjustments), over_ideal(after, sim.sizes[settled])


@pytest.mark.parametrize("intercept", [0.0, 0.01])
def test_two_adjustments_after_a_change_of_speed_are_enough(intercept):
    adjustments, ratios = zip(*(after_two_adjustments(seed, intercept) for seed in range(6)), strict=True)
    assert min(adjustments) >= 1
    assert max(adjustments) <= 3
    assert np.quantile(ratios, 0.9) <= 1.03  # a tenth of them may need a third one: the jitter is 5 %
    assert max(ratios) <= 1.04


@pytest.mark.parametrize(("n", "seed"), [(2, 0), (16, 0)])
def test_steady_workers_are_left_alone(n, seed):
    rng = np.random.default_rng(seed)
    true = ctrl.timing.BatchTime(1 / rng.uniform(1e3, 3e3, n), rng.uniform(0, 0.02, n))
    sim = simulate(ctrl.balance(), lambda _, b: true(b), [128] * n, 1100, every=10, jitter=0.05, seed=seed)
    assert (sim.changes >= 100).sum() <= 5  # in 1000 steps; at most one in a hundred is asked for
    assert over_ideal(true, sim.sizes[-1]) < 1.03


@pytest.mark.parametrize(("every", "seed"), [(10, 0), (1, 1)])
def test_a_slow_worker_with_flat_times_keeps_its_batch(every, seed):
    """Proportional control takes it down to nothing: 100, 60, 39, … 7, with no time gained after the first. With seed 1
    noise looks like drift, and the flat stretch that was seen is still believed."""
    true = ctrl.timing.BatchTime(np.array([0.05, 0.1, 0.1, 0.1]), 0.0, np.array([20.0, 0, 0, 0]))
    sim = simulate(ctrl.balance(), lambda _, b: true(b), [100] * 4, 800, every=every, jitter=0.05, seed=seed)
    assert sim.sizes[:, 0].min() >= 50
    assert len(sim.changes) <= 2
    assert (true(sim.sizes[-1]).max()) == 20


def test_speeds_that_drift_all_the_time_are_followed():
    """A mean over all steps lags, and a fit that takes drift for the curve of costs finds flat times and diverges."""
    drift = waves(0.4, 200, np.array([0.0, 0.25, 0.6, 0.9]))
    cluster = Cluster(ctrl.timing.BatchTime(np.full(4, 1e-3), np.full(4, 0.02)), drift, jitter(0.05))
    assert np.mean(simulate(ctrl.balance(), cluster, 512, 400).over_ideal[50:]) < 1.05


def test_a_short_pause_is_not_taken_for_a_change():
    """The first ones are believed at once; where they did not last, the next is waited for."""

    def times(step, sizes):
        slow = 6.0 if step in (30, 50, 70, 90, 110) or step >= 150 else 1.0
        return sizes * np.array([1e-3 * slow, 1e-3])

    sim = simulate(ctrl.balance(), times, [100, 100], 200, jitter=0.02)
    assert (sim.changes < 40).any()
    assert ((sim.changes > 75) & (sim.changes < 150)).sum() == 0
    assert sim.sizes[160:, 0].max() < 50


def test_the_split_of_a_global_batch_that_others_change():
    true = ctrl.timing.BatchTime(1 / np.array([1e3, 2e3, 4e3, 4e3]), 0.01, np.array([0.0, 0.02, 0.05, 0.05]))
    hooks = [Hooked(ctrl.schedule(lambda step: 128 * 2 ** (step // 100)), ()), Hooked(ctrl.balance(), every=10)]
    sim = simulate(hooks, lambda _, b: true(b), [32] * 4, 1000, jitter=0.05)
    assert sim.sizes[-1].sum() == 128 * 2**9
    ratios = [over_ideal(true, sim.sizes[step]) for step in range(190, 1000, 100)]
    assert ratios[0] < 1.1  # how far two workers' flat stretch reaches, nobody has seen yet
    assert max(ratios[1:]) < 1.05


def test_nothing_is_decided_while_a_worker_was_never_measured():
    policy = ctrl.balance(stretch_seconds=0)
    state = policy.init(2)
    for step in range(1, 40):
        decision, state = policy.update(observe(np.array([0.1, np.nan]), step=step), state)
        assert decision is None


def test_without_measurements_the_split_is_equal_again():
    """As recorded beside 17 busy processes: one noisy measurement, and then a compiler that is always busy."""
    policy, sizes, decisions = ctrl.balance(), (57, 57), {}
    state = policy.init(2)
    for step in range(1, 700):
        seconds = [0.110, 0.043] if step <= 150 else [np.nan, np.nan] if step < 600 else [0.06, 0.06]
        seen = observe(np.array(seconds), step=step, batch_sizes=sizes, due=step % 10 == 0)
        decision, state = policy.update(seen, state)
        if decision is not None:
            whole = np.asarray(decision.shares) / np.sum(decision.shares) * 114
            decisions[step], sizes = decision, tuple(int(size) for size in np.round(whole))
    given_up = [step for step, decision in decisions.items() if "were not measured" in decision.notes[0]]
    assert sizes == (57, 57)
    assert min(decisions) < 150
    assert given_up == [250]
    assert max(decisions) == 250
    assert decisions[250].notes == ("back to equal shares: 100 steps in a row were not measured on all workers",)


def test_a_split_by_the_script_stays_without_measurements():
    policy = ctrl.balance()
    state = policy.init(2)
    for step in range(1, 400):
        decision, state = policy.update(observe(np.full(2, np.nan), step=step, batch_sizes=(30, 60)), state)
        assert decision is None


def test_nothing_is_decided_where_there_is_nothing_to_split():
    policy = ctrl.balance(stretch_seconds=0)
    state, state_alone = policy.init(2), policy.init(1)
    for step in range(1, 20):
        too_much = observe(np.array([0.1, 0.3]), step=step, global_batch=10**6)
        decision, state = policy.update(too_much, state)
        assert decision is None
        decision, state_alone = policy.update(observe(np.array([0.1]), step=step, batch_sizes=(32,)), state_alone)
        assert decision is None


def decide(policy, seconds, steps=10, **kwargs):
    state = policy.init(len(seconds))
    for step in range(1, steps + 1):
        decision, state = policy.update(observe(np.asarray(seconds), step=step, due=step == steps, **kwargs), state)
    return decision


def test_shares_sum_to_the_global_batch_and_keep_limits():
    decision = decide(ctrl.balance(), [0.1, 0.3, 0.1], batch_sizes=(60, 60, 60), upper=70)
    assert decision.shares == (70, 40, 70)
    assert "slowest worker" in decision.notes[0]


def test_a_batch_that_falls_to_an_example_per_worker_is_split():
    """The least that is trusted, 2 for worker 0 and 1 for each other, is more than the batch. All speeds drift."""
    policy = ctrl.balance(stretch_seconds=0)
    state = policy.init(11)
    for step in range(1, 61):
        seconds, last = 1.05**step * np.array([0.5, *[0.01] * 10]), step == 60
        seen = observe(seconds, step=step, batch_sizes=(27, *[1] * 10), global_batch=11 if last else 37, due=last)
        decision, state = policy.update(seen, state)
    assert decision.shares == (1,) * 11


def test_sizes_are_multiples_of_the_quantum_where_that_is_cheap():
    decision = decide(ctrl.balance(), [0.1, 0.29], batch_sizes=(512, 512), quantum=16)
    assert all(share % 16 == 0 for share in decision.shares)
    decision = decide(ctrl.balance(), [0.1, 0.29], batch_sizes=(20, 20), quantum=16)
    assert decision.shares == (30, 10)


@pytest.mark.parametrize("call", [0.0, 5.0])
def test_sizes_are_multiples_of_the_drivers_minibatches(call):
    """12 examples at least, however much nearer to the best split a smaller step would come."""
    limits = Limits((12, 12), (4096, 4096), quantum=1, multiple=12, call_overhead=call)
    decision = decide(ctrl.balance(), [0.1, 0.29], batch_sizes=(60, 60), limits=limits)
    assert sum(decision.shares) == 120
    assert all(share % 12 == 0 for share in decision.shares)
    assert decision.shares in ((84, 36), (96, 24))


def test_sizes_stay_within_twice_and_a_quarter_of_the_measured_ones():
    assert decide(ctrl.balance(), [0.1, 0.2], batch_sizes=(100, 100)).shares == (133, 67)
    assert decide(ctrl.balance(), [0.1, 0.9], batch_sizes=(100, 100)).shares == (175, 25)
    assert decide(ctrl.balance(), [0.1, 0.9, 0.9], batch_sizes=(100, 100, 100)).shares == (200, 50, 50)


def test_a_change_must_pay_for_itself():
    for dead_band, changes in ((0.4, True), (0.6, False)):  # from 0.3 to 0.15 s, from 64, 64 to 96, 32
        decision = decide(ctrl.balance(stretch_seconds=0, dead_band=dead_band), [0.1, 0.3], batch_sizes=(64, 64))
        assert (decision is not None) == changes


@pytest.mark.parametrize("wrong", [{"dead_band": -1}, {"stretch_seconds": -1}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ctrl.balance(**wrong)


@pytest.mark.parametrize("seed", range(2))
def test_a_sudden_growth_of_the_batch_is_not_split_by_extrapolated_noise(seed):
    """Equal workers, 40 % jitter, a few sizes seen: lines through such points fan out at eight times the size."""
    hooks = [Hooked(ctrl.schedule({0: 64, 21: 128, 41: 256, 61: 2048}), ()), Hooked(ctrl.balance(), every=5)]
    sim = simulate(hooks, lambda _, b: 1e-3 + b * 1e-4, [32, 32], 75, jitter=0.4, seed=seed)
    assert (sim.sizes[:, 0] / sim.sizes[:, 1]).max() < 1.5
    assert (sim.sizes[:, 1] / sim.sizes[:, 0]).max() < 1.5


# --- rounds of clients with links -------------------------------------------------------------------------------------

SPEED, LINK, MINIBATCHES = np.array([1000.0, 500.0, 250.0]), np.array([0.05, 0.2, 0.0]), 4


def of_round(link, sizes=(280, 280, 280), **others):
    """The decision after three rounds of three clients with these links."""
    policy = ctrl.balance(stretch_seconds=0, **others)
    state = policy.init(3)
    for step in range(1, 4):
        seen = observe(
            np.asarray(sizes) / SPEED, link, step=step, batch_sizes=sizes, lower=MINIBATCHES, quantum=MINIBATCHES
        )
        decision, state = policy.update(seen, state)
    return decision


def test_clients_finish_together_with_their_links():
    """T with sum_i (T - link_i) v_i = X, by hand: (840 + 50 + 100) / 1750 = 0.5657 s; in multiples of 4."""
    level = (840 + (LINK * SPEED).sum()) / SPEED.sum()
    np.testing.assert_allclose(of_round(LINK).shares, (level - LINK) * SPEED, atol=MINIBATCHES)
    assert of_round(np.zeros(3)).shares == (480, 240, 120)
    assert of_round(np.full(3, 0.1)).shares == (480, 240, 120)  # a delay of all changes nothing
    assert of_round(np.array([0.0, 0.0, 2.0])).shares[2] == 72  # the least that is trusted: a quarter


def test_rounds_wait_for_links_that_are_not_known():
    for unknown in (np.nan, -1.0):
        assert of_round(np.array([0.1, unknown, 0.1])) is None
