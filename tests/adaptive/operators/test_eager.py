"""Outside a program a driver is ordinary Python: it can be called, printed from, and stopped in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.base.world import MembersChanged
from tests.adaptive.drivers import make_data, mean_loss
from tests.relaxed import relaxed_tx

W = jnp.array([0.3, -0.2, 0.1])
DATA = {k: jnp.asarray(v) for k, v in make_data(8).items()}
TX = relaxed_tx(optax.adam(0.1))


STATE = (W, TX.init(W))


def test_a_driver_takes_the_first_step_that_a_program_takes():
    def quiet(state, batch):
        params, opt = state
        grads = comm.all_reduce(jax.grad(mean_loss)(params, batch))
        updates, opt = TX.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"norm": jnp.linalg.norm(grads)}

    with ad.Program(quiet, STATE, DATA, global_batch=8, resizable=False) as program:
        report = program.step()
        rows = program._parts.stream.indices(0, 8)
        state = program.state
    eager, metrics = quiet(STATE, {k: v[rows] for k, v in DATA.items()})
    np.testing.assert_allclose(state[0], eager[0], rtol=1e-5)
    np.testing.assert_allclose(report.metrics["norm"], metrics["norm"], rtol=1e-5)


@pytest.mark.parametrize("world", [None, lambda: comm.DeviceWorld(jax.local_devices()[:2])])
def test_a_mean_of_nothing_is_an_error(world):
    def call():
        assert comm.all_reduce(jnp.ones(2), weight=1e-30).tolist() == [1.0, 1.0]
        with pytest.raises(
            ad.NonFiniteError, match=r"outside a program \(test_eager.py:\d+\) is a mean over no examples"
        ):
            comm.all_reduce(jnp.ones(2), weight=0)

    if world is None:
        call()
    else:
        with world():
            call()


@pytest.mark.parametrize(
    "what",
    [
        lambda x: comm.all_reduce(x),
        lambda x: x + ad.step_number().astype(float),
        lambda x: mon.ema(x),
    ],
)
def test_the_error_about_jit_outside_a_program_says_what_to_write(what):
    with pytest.raises(ad.CollectiveError, match=r"jax\.disable_jit\(\)"):
        jax.jit(what)(jnp.float32(1.0))
    with jax.disable_jit():
        assert np.isfinite(jax.jit(what)(jnp.float32(1.0)))


def test_a_jit_that_was_seen_by_a_program_is_not_mistaken_for_it_outside():
    helper = jax.jit(lambda x: comm.all_gather(x).sum())

    def gathering(state, batch):
        return state + helper(state), {"y": comm.all_reduce(batch["y"].mean())}

    with ad.Program(gathering, 1.0, DATA, global_batch=4, resizable=False) as program:
        program.step()
    with pytest.raises(ad.CollectiveError, match="outside a program"):
        helper(jnp.float32(1.0))


def test_values_are_sent_again_if_members_are_lost_meanwhile(monkeypatch):
    with comm.DeviceWorld(jax.local_devices()[:2]) as world:
        exchange, lost = world.exchange, [MembersChanged(), MembersChanged()]

        def failing(*args):
            if lost:
                raise lost.pop()
            return exchange(*args)

        monkeypatch.setattr(world, "exchange", failing)
        assert float(comm.all_reduce(2.0, op="sum")) == 4.0
        assert not lost
