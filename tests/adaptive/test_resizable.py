"""Programs whose batch sizes stay as they are: `resizable=False`."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive.base.decision import Decision
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import Recorder, make_data, mean_loss

W = np.array([0.3, -0.2, 0.1], np.float32)


def sgd(state, batch):
    loss, grads = jax.value_and_grad(mean_loss)(state, batch)
    return state - 0.1 * comm.all_reduce(grads), {"loss": comm.all_reduce(loss)}


def build(driver=sgd, *, workers=2, global_batch=12, resizable=False, **options):
    world = LocalWorld(workers)
    return ad.Program(driver, W, make_data(), global_batch=global_batch, world=world, resizable=resizable, **options)


def test_only_the_kernels_of_the_first_step_are_compiled():
    kernels = {}
    for resizable in (True, False):
        with build(resizable=resizable) as program:
            program.step()
            assert program._parts.engine.kernels.warm or resizable
            program.warm_up()
            kernels[resizable] = program.step().kernels
    assert kernels[False] == 1  # of 6 examples, for both workers
    assert kernels[True] == 4  # and the buckets


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
@pytest.mark.parametrize(
    ("workers", "global_batch", "microbatch", "microbatches"),
    [(2, 14, None, [(7,), (7,)]), (2, 14, 3, [(3, 3, 1)] * 2), (1, 7, None, [(4, 3)])],
)
def test_a_batch_runs_as_few_microbatches_as_possible(workers, global_batch, microbatch, microbatches, options):
    """A noise scale needs two calls of a lone worker."""

    def driver(state, batch):
        grads = jax.grad(mean_loss)(state, batch)
        mean = comm.all_reduce(grads)
        return state - 0.1 * mean, {"noise": mon.noise_scale(grads, mean).scale}

    with build(driver, workers=workers, global_batch=global_batch, microbatch=microbatch, **options) as program:
        reports = [program.step() for _ in range(4)]
    assert [list(r.microbatches) for r in reports] == [microbatches] * 4


def test_other_sizes_are_refused_and_the_program_continues():
    with build() as program:
        program.step()
        for asked, sizes in (({"global_batch": 20}, "(10, 10)"), ({"shares": (2, 1)}, "(8, 4)")):
            with pytest.raises(ad.BatchSizeError, match="resizable=False") as caught:
                program.rescale(**asked)
            assert f"program.rescale asked for batch sizes {sizes}" in str(caught.value)
            assert "batch sizes are fixed, (6, 6)" in str(caught.value)
        program.rescale(global_batch=12, shares=(1, 1))  # they are that
        assert program.step().batch_sizes == (6, 6)


def test_a_hook_that_asks_for_other_sizes_is_named():
    recorder = Recorder(lambda o: Decision(global_batch=12 if o.step < 2 else 24))

    def driver(state, batch):
        new, metrics = sgd(state, batch)
        operators.hook("grow", recorder, (metrics["loss"],))
        return new, metrics

    with build(driver) as program:
        program.step()  # the sizes that there are may be asked for
        with pytest.raises(ad.BatchSizeError, match=r"hook 'grow' asked for batch sizes \(12, 12\)") as caught:
            program.step()
    assert any("after step 2" in note for note in caught.value.__notes__)


def test_a_checkpoint_brings_its_own_sizes():
    """As building does: kernels are waited for, and there are no others."""
    with build(resizable=True, shares=(8, 4)) as program:
        program.step()
        checkpoint = program.checkpoint()
        expected = program.step().metrics["loss"]
    with build() as program:
        before = program.step()
        program.restore(checkpoint)
        after = program.step()
        assert program._parts.engine.kernels.warm
    assert after.batch_sizes == (8, 4)
    assert after.metrics["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert after.kernels == before.kernels + 2
    assert after.waited_seconds > before.waited_seconds
