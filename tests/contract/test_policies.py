"""Splits by speed: LB-BSP, dynamic batching, goodput, and the allocator, on simulated workers of known speed."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from controllers.simulate import Cluster, Hooked, by_step, jitter, simulate

from .problem import DATA, START, check_descent, descend

SPEED = np.array([1000.0, 500.0, 250.0])  # examples per second
PROPORTIONAL = ctrl.timing.BatchTime(1 / SPEED, np.zeros(3))
AFFINE = ctrl.timing.BatchTime(1 / SPEED, np.array([0.02, 0.01, 0.1]))
FLOORED = ctrl.timing.BatchTime(1 / SPEED, np.zeros(3), np.array([0.05, 0.25, 0.02]))  # no less than these seconds


LOW_FLOORS = FLOORED._replace(floor=np.array([0.05, 0.06, 0.02]))


@pytest.mark.parametrize("times", [PROPORTIONAL, AFFINE, LOW_FLOORS], ids=["proportional", "affine", "floors"])
def test_the_allocator_is_exact_on_a_piecewise_linear_model_of_time(times):
    splits = [
        np.array([a, b, 60 - a - b]) for a, b in itertools.product(range(2, 41), repeat=2) if 2 <= 60 - a - b <= 40
    ]
    best = min(times(split).max() for split in splits)
    found = ctrl.timing.allocate(60, times, 2, 40)
    assert found.sum() == 60
    assert times(found).max() == best


POLICIES = {
    "static_proportional": (lambda: ctrl.published.static_proportional(SPEED), PROPORTIONAL, 1.02),  # open loop
    "proportional": (lambda: ctrl.published.proportional(), PROPORTIONAL, 1.06),  # dynamic batching; dead band of 5 %
    "leader_straggler": (lambda: ctrl.published.leader_straggler(), AFFINE, 1.06),
    "lb_bsp, arx": (lambda: ctrl.published.lb_bsp(ctrl.published.arx()), PROPORTIONAL, 1.06),
    "lb_bsp, narx": (lambda: ctrl.published.lb_bsp(ctrl.published.narx()), PROPORTIONAL, 1.06),
    "balance": (lambda: ctrl.balance(), AFFINE, 1.03),
    "balance, floors": (lambda: ctrl.balance(), FLOORED, 1.03),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_finds_the_split_of_its_model(name):
    make, times, within = POLICIES[name]
    policy = make()
    values = (lambda step, seconds: ()) if name == "static_proportional" else None
    cluster = Cluster(times, noise=jitter(0.01))
    found = simulate(policy, cluster, sizes=252, steps=400, every=5, values=values, seed=1)
    assert (found.global_batch == 252).all()
    assert found.over_ideal[0] > 1.2
    assert found.over_ideal[-50:].mean() < within


def test_balance_follows_a_change_of_speed():
    slowdown = by_step(np.where(np.arange(300)[:, None] >= 150, [1.0, 1.0, 3.0], 1.0))
    found = simulate(ctrl.balance(), Cluster(AFFINE, slowdown=slowdown, noise=jitter(0.01)), 240, 300, every=10)
    assert found.over_ideal[100:150].mean() < 1.03
    assert found.over_ideal[150] > 1.5
    assert found.over_ideal[200:].mean() < 1.05
    assert len(found.adjustments) <= 12


@pytest.mark.parametrize("predictor", [ctrl.published.arx, ctrl.published.narx], ids=["arx", "narx"])
def test_speeds_are_predicted_from_free_resources(predictor):
    """A split by predicted speeds is better than one by past speeds where a measured share of the processor jumps."""
    rng, n, steps = np.random.default_rng(0), 3, 300
    share = np.ones((steps + 2, n))
    for step in range(1, steps + 2):
        share[step] = np.where(rng.random(n) < 0.05, rng.uniform(0.2, 1, n), share[step - 1])

    def mean_step(policy, values):
        found = simulate(policy, lambda step, sizes: sizes / (1e3 * share[step]), [128] * n, steps, values=values)
        return found.step_seconds[150:].mean()

    informed = mean_step(
        ctrl.published.lb_bsp(predictor(), n_inputs=1), lambda step, seconds: (seconds, share[step + 1])
    )
    past = ctrl.published.moving_average(), ctrl.published.memoryless()
    blind = [mean_step(ctrl.published.lb_bsp(rule), lambda step, seconds: (seconds,)) for rule in past]
    assert informed < 0.97 * min(blind)


def test_federated_clients_finish_together_links_included():
    link, parts = np.array([0.05, 0.2, 0.0]), 4
    limits = ad.Limits(lower=(parts,) * 3, upper=(10_000,) * 3, quantum=parts, multiple=parts)
    found = simulate(
        ctrl.balance(),
        Cluster(PROPORTIONAL),
        sizes=840,
        steps=40,
        every=2,
        limits=limits,
        values=lambda step, seconds: (seconds, link),
    )
    sizes = found.sizes[-1]
    rounds = sizes / SPEED + link
    assert sizes.sum() == 840
    assert not (sizes % parts).any()
    assert rounds.max() - rounds.min() < 2 * parts / SPEED.min()
    assert rounds.max() < 0.75 * (280 / SPEED + link).max()


def test_goodput_weighs_examples_per_second_against_progress_per_example():
    """Between a batch of good statistical efficiency and one of high speed: `sqrt(noise * speed * overhead)`."""
    scale, overhead = 400.0, 0.2
    times = ctrl.timing.BatchTime(np.full(3, 1e-3), np.full(3, 1e-3))
    cluster = Cluster(times, noise=jitter(0.01), overhead=overhead, noise_scale=lambda examples: scale, upper=4000)
    reads = ("noise_scale", "seconds", "iteration_seconds")
    found = simulate([Hooked(ctrl.goodput_batch(), reads, 10)], cluster, sizes=30, steps=600)

    def goodput(batch):
        return batch / (batch / 3000 + 1e-3 + overhead) / (scale + batch)

    best = max(goodput(batch) for batch in range(3, 6000))
    assert goodput(found.global_batch[0]) < 0.5 * best
    assert goodput(found.global_batch[-1]) > 0.93 * best


def test_a_policy_is_pure():
    policy = ctrl.balance()
    state, again = policy.init(3), policy.init(3)
    sizes, decisions = (84, 84, 84), []
    limits = ad.Limits((1,) * 3, (252,) * 3)
    for step in range(1, 13):
        seconds = AFFINE(np.array(sizes))
        observation = ad.Observation(
            step=step,
            epoch=0.0,
            values=(seconds,),
            batch_sizes=sizes,
            previous_batch_sizes=sizes,
            global_batch=252,
            limits=limits,
            due=step % 4 == 0,
        )
        kept = jax.tree.map(np.copy, state)
        decision, new = policy.update(observation, state)
        jax.tree.map(np.testing.assert_array_equal, state, kept)  # not modified
        other, again = policy.update(observation, again)
        assert decision == other
        decisions.append(decision)
        state = new
    assert any(decision and decision.shares for decision in decisions)


def test_a_program_splits_by_the_seconds_that_its_hook_receives(devices):
    """Made-up seconds: worker i needs i + 1 times as long for an example. The gradient stays that of all examples."""

    def driver(w, batch):
        slowness = jnp.asarray([1e-3, 2e-3, 4e-3], jnp.float64)[ad.worker_index()]
        seconds = comm.all_gather(slowness * ad.batch_size().astype(jnp.float64))
        ctrl.hook(ctrl.published.lb_bsp(ctrl.published.moving_average()), seconds, every=3)
        return descend(w, batch)

    with ad.Program(driver, START, DATA, global_batch=42, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=10))
        check_descent(program.state, reports)
    assert reports[0].batch_sizes == (14, 14, 14)
    np.testing.assert_allclose(reports[-1].batch_sizes, [24, 12, 6], atol=1)
