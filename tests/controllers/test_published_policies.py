"""The published policies: their own numbers, one by one. What they have in common is in test_battery."""

from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.base.errors import DriverError
from controllers.policies.proportional import proportional_step
from controllers.simulate import simulate

from .observations import observe

LBB = ctrl.BatchTime(  # milliseconds; Table 2 of LBB
    np.array([0.5931, 0.5808, 0.6023, 2.6714]), np.array([5.896, 7.152, 8.291, 50.982])
)
CORES = np.array([3.0, 5.0, 12.0])


def path(policy, times, sizes, steps, **kwargs):
    """The splits that were tried, one after the other."""
    sim = simulate(policy, lambda _, b: times(b), sizes, steps, **kwargs)
    return sim.sizes[[0, *sim.changes]].tolist()


# --- static -----------------------------------------------------------------------------------------------------------


def test_static_splits_by_capacity():
    """Tyagi & Sharma, figure 3: (3, 5, 12) cores with 64 examples each on average: 28.8, 48, 115.2."""
    policy = ctrl.static_proportional(CORES)
    assert path(policy, lambda b: b / CORES, [64, 64, 64], 20) == [[64, 64, 64], [29, 48, 115]]
    by_value = ctrl.static_proportional()
    gathered = path(by_value, lambda b: b / CORES, [64, 64, 64], 20, values=lambda step, seconds: (CORES,))
    assert gathered == [[64, 64, 64], [29, 48, 115]]


def test_static_without_capacities_says_how_to_gather_them():
    for values in ((), (np.ones(2),), (3.0,)):
        with pytest.raises(DriverError, match=r"ctrl\.cores"):
            ctrl.static_proportional().update(observe(*values, batch_sizes=(8, 8, 8)), ())


def test_cores_are_counted_in_a_program():
    def driver(state, batch):
        ctrl.hook(ctrl.static_proportional(), comm.all_gather(ctrl.cores()))
        return state, {"cores": comm.all_gather(ctrl.cores())}

    program = ad.Program(driver, np.zeros((), np.float32), {"x": np.zeros((8, 1), np.float32)}, global_batch=4)
    assert program.step().metrics["cores"][0] >= 1


# --- proportional -----------------------------------------------------------------------------------------------------


def test_as_published_one_step_inflates_the_global_batch():
    sizes = proportional_step(np.full(3, 64.0), 64 / CORES)
    np.testing.assert_allclose(sizes, [39.47, 65.78, 157.87], atol=0.01)
    assert sizes.sum() / 192 == pytest.approx((1 / CORES).mean() * CORES.mean())  # 1.370
    published = ctrl.proportional(renormalize=False)
    assert path(published, lambda b: b / CORES, [64, 64, 64], 100, every=10)[1] == [39, 66, 158]


def test_renormalised_it_is_there_in_one_step():
    sizes = proportional_step(np.full(3, 64.0), 64 / CORES)
    np.testing.assert_allclose(sizes * 192 / sizes.sum(), [28.8, 48, 115.2])
    assert path(ctrl.proportional(), lambda b: b / CORES, [64, 64, 64], 100, every=10) == [[64, 64, 64], [29, 48, 115]]


def test_renormalised_it_is_the_rule_of_dbs():
    rng = np.random.default_rng(0)
    sizes, seconds = rng.uniform(10, 100, 6), rng.uniform(0.1, 1, 6)
    step = proportional_step(sizes, seconds)
    np.testing.assert_allclose(step / step.sum(), (sizes / seconds) / (sizes / seconds).sum())


def test_with_a_fixed_part_in_the_time_what_is_off_shrinks_by_it():
    """c / T* = 2 / 11.6 of it is left after a step: 51.2, 9.1, 1.53, .26, .045."""
    sizes, off = np.full(3, 64.0), []
    for _ in range(5):
        off.append(np.abs(sizes - [28.8, 48, 115.2]).max())
        sizes = proportional_step(sizes, 2 + sizes / CORES)
        sizes *= 192 / sizes.sum()
    np.testing.assert_allclose(off, [51.2, 9.1, 1.53, 0.26, 0.045], rtol=0.03)


def test_two_adjustments_from_equal_batches():
    """Tyagi & Sharma, figure 4a."""
    tried = path(ctrl.proportional(), lambda b: 2 + b / CORES, [64, 64, 64], 200, every=10)
    assert len(tried) == 3
    np.testing.assert_allclose(tried[-1], [28.8, 48, 115.2], atol=1.5)


def test_the_dead_band_is_on_all_workers_at_once():
    def times(b):
        return b / np.array([100.0, 96.0])

    assert len(path(ctrl.proportional(), times, [100, 100], 100, every=10)) == 1
    assert len(path(ctrl.proportional(dead_band=0.01), times, [100, 100], 100, every=10)) == 2


def test_bounds_on_sizes():
    tried = path(ctrl.proportional(min_size=40, max_size=90), lambda b: b / CORES, [64, 64, 64], 200, every=10)
    assert tried[-1][2] == 90
    assert min(map(min, tried)) >= 40
    assert {sum(sizes) for sizes in tried} == {192}


def test_an_upper_bound_is_learnt_where_throughput_drops():
    def thrashes(b):
        return np.where(b > 110, 2.0, 1.0) * b / CORES  # all workers, from 110 examples on

    policy = ctrl.proportional()
    sim = simulate(policy, lambda _, b: thrashes(b), [64, 64, 64], 400, every=10)
    assert sim.sizes[:, 2].max() > 110
    assert sim.sizes[-1, 2] == 64  # what it had before
    assert simulate(ctrl.proportional(drop=None), lambda _, b: thrashes(b), [64] * 3, 400, every=10).sizes[-1, 2] > 64


def test_a_flat_slow_worker_collapses():
    """Why `balance` exists."""
    flat = ctrl.BatchTime(np.array([0.05, 0.1, 0.1, 0.1]), 0.0, np.array([20.0, 0, 0, 0]))
    tried = path(ctrl.proportional(), flat, [100] * 4, 400, every=10)
    assert [sizes[0] for sizes in tried[:4]] == [100, 57, 34, 22]
    assert tried[-1][0] < 5
    assert flat(tried[-1]).max() == flat(tried[0]).max()


# --- leader and straggler ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "adjustments"), [(1, 108), (2, 54), (5, 23), (8, 15), (16, 10)])
def test_adjustments_on_the_four_gpus_of_lbb(step, adjustments):
    tried = path(ctrl.leader_straggler(step=step, window=1), LBB, [128] * 4, 500)
    assert len(tried) - 1 == adjustments
    assert 104.4 <= LBB(tried[-1]).max() <= 104.75


def test_the_allocator_needs_two():
    tried = path(ctrl.balance(), LBB, [128] * 4, 500, every=10)
    assert len(tried) - 1 == 2
    assert tried[-1] == [166, 167, 159, 20]


def test_a_worker_short_of_memory_is_not_given_more():
    free = np.array([1e9, 1e6, np.nan, 1e9])
    policy = ctrl.leader_straggler(window=1, min_free_bytes=1e8)
    tried = path(policy, LBB, [128] * 4, 500, values=lambda step, seconds: (seconds, free))
    assert max(sizes[1] for sizes in tried) == 128
    assert tried[-1][0] > 128
    assert tried[-1][2] > 128


def test_it_comes_to_rest_where_sizes_are_coarse_and_wakes_when_times_come_apart():
    def times(step, b):
        return b * np.array([1.0, 1.4]) * (1 if step < 200 else np.array([2.0, 1.0]))

    sim = simulate(ctrl.leader_straggler(window=1), times, [5, 5], 400)
    assert len(sim.changes[(sim.changes > 50) & (sim.changes < 200)]) == 0
    assert len(sim.changes[sim.changes >= 200]) >= 1
    assert len(sim.changes[sim.changes >= 250]) == 0
    assert sim.sizes[-1].tolist() in ([4, 6], [5, 5])


# --- LB-BSP -----------------------------------------------------------------------------------------------------------


def test_lb_bsp_splits_by_speed():
    assert path(ctrl.lb_bsp(), lambda b: b / CORES, [64, 64, 64], 50) == [[64, 64, 64], [29, 48, 115]]


@pytest.mark.parametrize("predictor", [ctrl.arx(), ctrl.narx()], ids=["arx", "narx"])
def test_lb_bsp_follows_processor_shares_better_than_past_speeds(predictor):
    rng = np.random.default_rng(0)
    steps, n = 600, 4
    jumps = rng.random((steps, n)) < 0.04
    share = np.ones((steps + 2, n))
    for k in range(1, steps + 2):
        share[k] = np.where(jumps[k % steps], rng.uniform(0.2, 1, n), share[k - 1])

    def mean_step(policy, values):
        sim = simulate(policy, lambda step, b: b / (1e3 * share[step]), [128] * n, steps, values=values)
        return sim.step_seconds[200:].mean()

    # Measured after the step, for the next one: the program's own inputs are of the step before.
    informed = mean_step(ctrl.lb_bsp(predictor, n_inputs=1), lambda step, t: (t, share[step + 1]))
    blind = mean_step(ctrl.lb_bsp(ctrl.moving_average()), lambda step, t: (t,))
    assert informed < blind


def test_lb_bsp_says_when_inputs_are_not_what_it_was_made_for():
    policy = ctrl.lb_bsp(n_inputs=1)
    with pytest.raises(ValueError, match="n_inputs=2"):
        policy.update(observe(np.ones(2), np.ones(2), np.ones(2)), policy.init(2))
    with pytest.raises(DriverError, match="after the times"):
        policy.update(observe(np.ones(2), np.ones(3)), policy.init(2))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ctrl.proportional(dead_band=-1),
        lambda: ctrl.proportional(min_size=9, max_size=8),
        lambda: ctrl.leader_straggler(step=0),
        lambda: ctrl.lb_bsp(dead_band=-1),
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        wrong()
