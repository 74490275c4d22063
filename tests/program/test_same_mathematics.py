"""Training is the same whatever a batch is split into: against plain optax, and against one worker."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

from . import problems
from .problems import adam_driver, adam_state, build, by_first, difference, force_microbatches, make_data, plain_adam

COVERS = ("adaptive/runtime/engine.py",)

STEPS, SEED = 50, 3
GLOBAL_BATCHES = (12, 20, 28)


def train_with_random_sizes(world, data, seed: int, *, random_microbatches: bool) -> tuple[list[int], problems.Params]:
    """50 steps; every few of them another global batch and another split. Returns the global batches and params."""
    rng = np.random.default_rng(seed)
    batches, splits, microbatches = [], set(), set()
    options = {"resizable": True, "microbatch": 8 if random_microbatches else None}
    with build(adam_driver, adam_state(), data, 20, world=world, **options) as program:
        program.warm_up()
        if random_microbatches:
            force_microbatches(program, seed, largest=min(8, 20 // world.size))
        while len(batches) < STEPS:
            for _ in range(min(int(rng.integers(2, 5)), STEPS - len(batches))):
                report = program.step()
                batches.append(report.global_batch)
                splits.add(report.batch_sizes)
                microbatches.update(report.microbatches)
            program.rescale(global_batch=int(rng.choice(GLOBAL_BATCHES)), shares=random_shares(rng, world.size))
        assert problems.same_everywhere(world, program.state)
        assert len(set(batches)) == len(GLOBAL_BATCHES)
        assert world.size == 1 or len(splits) > 8
        assert not random_microbatches or (len(microbatches) > 20 and max(max(p, default=0) for p in microbatches) <= 8)
        return batches, program.state["params"]


def random_shares(rng: np.random.Generator, workers: int) -> list[float]:
    """Far from equal; now and then a worker has next to nothing."""
    shares = rng.dirichlet(np.full(workers, 1.5))
    shares[rng.integers(workers)] *= rng.random() > 0.3 or workers == 1
    return shares.tolist()


@pytest.mark.parametrize("random_microbatches", [False, True], ids=["cheapest microbatches", "random microbatches"])
def test_50_adam_steps_on_random_splits_are_those_of_plain_optax(world, precision, random_microbatches, capsys):
    data = make_data()
    batches, ours = train_with_random_sizes(world, data, 7, random_microbatches=random_microbatches)

    def plainly():
        plain = plain_adam(data, batches, SEED)
        return difference(ours, plain), [difference(plain_adam(data, batches, SEED, i), plain) for i in range(5)]

    error, reordered = by_first(world, plainly)
    if world.rank == 0:
        with capsys.disabled():
            print(
                f"\n{world!r}, {precision}: off plain optax by {error:.1e}; plain optax off itself, the examples "
                f"of its batches reordered, by {min(reordered):.1e} … {max(reordered):.1e}"
            )
    if precision == "float64":
        assert error < 1e-10
    assert error <= 3 * max(reordered)
    assert min(reordered) > 0  # so it measures something


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
def test_an_uneven_split_has_the_gradient_of_the_union(workers, precision):
    """88 and 8 examples: a mean of the workers' means would be off by the size of the gradient itself."""
    data = make_data(96)
    params = problems.make_params()
    shares = [88, 8] if workers.size == 2 else [88] + [8 / (workers.size - 1)] * (workers.size - 1)

    def driver(state, batch):
        grads = jax.grad(problems.mean_loss)(params, batch)
        return comm.all_reduce(grads), {"mean of means": comm.all_reduce(grads, weight=1.0)}

    with build(driver, params, data, 96, world=workers, shares=shares) as program:
        report = program.step()
        ours = program.state
    assert max(report.batch_sizes) == 88
    union = jax.grad(problems.mean_loss)(params, data)
    assert difference(ours, union) <= 1e-6
    assert difference(report.metrics["mean of means"], union) > 0.1


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
def test_a_share_of_nothing_is_no_examples(workers, precision):
    """Each worker in turn takes none, and then all: what comes out is that of the examples of the others."""
    data, n = make_data(), workers.size

    def driver(state, batch):
        size = ad.batch_size()
        return state + 1, {
            "sum": comm.all_reduce(batch["x"].sum(), op="sum"),
            "mean": comm.all_reduce(batch["x"].mean(0)),
            "largest": comm.all_reduce(batch["x"].max() - 100, op="max"),
            "least": comm.all_reduce(batch["label"].min() + 7, op="min"),
            "most": comm.all_reduce(batch["label"].max() - 7, op="max"),
            "sizes": comm.all_gather(size),
            "shares": comm.all_gather(size / 24),
            "seconds": comm.all_gather(mon.compute_seconds()),
        }

    outs = [shares for worker in range(n) for shares in (np.arange(n) != worker, np.arange(n) == worker)]
    options = {"shares": outs[0] * 1.0, "deterministic": True, "resizable": True}
    with build(driver, jnp.zeros(()), data, 24, world=workers, **options) as program:
        for shares in outs:
            program.rescale(global_batch=24 if shares.sum() > 1 else 1, shares=shares * 1.0)  # one, for n workers
            report = program.step()
            assert [size > 0 for size in report.batch_sizes] == shares.tolist()
            found, end = report.metrics, report.examples
            rows = problems.stream(160, SEED, end)[end - report.global_batch :]
            x, label = data["x"][rows], data["label"][rows]
            np.testing.assert_allclose(found["sum"], x.sum(), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(found["mean"], x.mean(0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found["largest"], x.max() - 100, rtol=1e-6)
            assert (int(found["least"]), int(found["most"])) == (label.min() + 7, label.max() - 7)
            assert found["sizes"].tolist() == list(report.batch_sizes)
            assert (np.isnan(found["shares"]) == ~shares).all()
            assert np.isnan(found["seconds"][~shares]).all()
            assert problems.same_everywhere(workers, jax.tree.leaves(found)[:1])
        assert float(program.state) == 2 * n


RESIZES = {3: (40, (1, 2, 3, 4)), 6: (64, (5, 1, 1, 1)), 9: (24, (1, 0, 0, 1)), 12: (25, (1, 1, 1, 1))}


def trajectory(world) -> tuple[list[float], list[int], dict]:
    """Losses, global batches and the last state, with hooks that resize at fixed steps."""

    def resize(control, step):
        if step in RESIZES:
            global_batch, shares = RESIZES[step]
            control.rescale(global_batch=global_batch, shares=shares[: control.capacity])

    def driver(state, batch):
        ctrl.hook(resize, ad.step_number() + 1)
        return adam_driver(state, batch)

    with build(driver, adam_state(), make_data(), 32, world=world, microbatch=8, resizable=True) as program:
        program.warm_up()
        reports = list(program.run(steps=15))
        return [float(r.metrics["loss"]) for r in reports], [r.global_batch for r in reports], program.state


@pytest.mark.parametrize("precision", ["float64"], indirect=True)
def test_a_driver_gives_the_same_results_on_every_world(world, precision):
    losses, batches, state = trajectory(world)

    def alone():
        with comm.SoloWorld() as alone:
            expected, batches, state = trajectory(alone)
            return expected, batches, jax.tree.map(np.asarray, state)

    expected, expected_batches, expected_state = by_first(world, alone)
    assert batches == expected_batches == [32] * 3 + [40] * 3 + [64] * 3 + [24] * 3 + [25] * 3
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    assert difference(state, expected_state) < 1e-11


# --- several messages at one level ------------------------------------------------------------------------------------


def rounds(state, batch):
    """Two levels: what the second reduces follows from what the first has brought; each reduces several things."""
    mean = comm.all_reduce(batch["x"].mean(0))
    shares = comm.all_gather(ad.batch_size())
    most = comm.all_reduce(jnp.abs(batch["x"]).max(), op="max")
    spread = comm.all_reduce(jnp.square(batch["x"] - mean[None]).mean(0))
    count = comm.all_reduce(len(batch["x"]), op="sum")
    ctrl.hook(lambda control, most: control.step < 3 and control.rescale(shares=range(1, control.capacity + 1)), most)
    return state + mean + spread / most, {"most": most, "count": count, "shares": shares, "spread": spread.sum()}


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
def test_messages_may_be_more_than_levels(world, precision, monkeypatch):
    """Each contribution in a separate message gives bitwise equal results, and as many messages."""
    found, sent = [], []
    for grouped in (None, lambda ready: [[c] for c in ready]):
        if grouped:
            monkeypatch.setattr("adaptive.graph.partition.grouped", grouped)
        with build(
            rounds, jnp.zeros(problems.FEATURES), make_data(), 8 * world.size, world=world, resizable=True
        ) as program:
            program.warm_up()
            reports = [program.step() for _ in range(6)]
            found.append(([r.metrics for r in reports], program.state))
            sent.append(reports[-1].messages)
            assert f"message {sent[-1]} " in program.explain()
    assert sent == [2, 5]
    together, apart = (jax.tree.map(lambda x: np.asarray(x).tolist(), f) for f in found)
    assert together == apart


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_message_that_is_not_finite_ends_a_step_of_several(world, precision, monkeypatch, wrong):
    monkeypatch.setattr("adaptive.graph.partition.grouped", lambda ready: [[c] for c in ready])

    def driver(state, batch):
        values = [batch["x"].mean(), batch["x"].mean()]
        values[wrong] = jnp.log(-jnp.abs(values[wrong]) - 1)
        one, other = (comm.all_reduce(v) for v in values)
        return state + one + other, {}

    with build(driver, 0.0, make_data(), 8 * world.size, world=world) as program:
        with pytest.raises(ad.NonFiniteError, match="infinities or NaNs"):
            program.step()
        assert program.state == 0
