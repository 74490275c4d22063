"""The way back from a contribution that is not finite ends at the driver's line that made it so."""

from __future__ import annotations

import re

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.runtime.local_world import LocalWorld

X = np.arange(1.0, 9, dtype=np.float32)


def origin(driver, x=X, state=1.0, workers=1, **options) -> str:
    """Return a program's text about the origin of the first NaN, with lines relative to the driver's first."""
    options = {"global_batch": len(x), **options}
    program = ad.Program(driver, state, {"x": x}, world=LocalWorld(workers), resizable=False, **options)
    with program, pytest.raises(ad.NonFiniteError) as error:
        list(program.run(steps=3))
    (line,) = [line for line in str(error.value).splitlines() if line.startswith("On worker")]
    first = driver.__code__.co_firstlineno
    return re.sub(r"test_nan_origin.py:(\d+)", lambda m: f"+{int(m[1]) - first}", line)


def test_a_function_of_jax_is_attributed_to_the_calling_line():
    def driver(state, batch):
        small = jnp.var(batch["x"]) * 0
        spread = jnp.std(batch["x"] * jnp.inf)
        return state + comm.all_reduce(spread + small), {}

    assert "(+2)" in origin(driver)


def test_a_gradient_is_made_by_the_line_that_is_differentiated():
    def driver(state, batch):
        def loss(w):
            z = w * batch["x"]
            return jnp.sqrt(z - z).mean()

        return state - comm.all_reduce(jax.grad(loss)(state)), {}

    assert "(+3)" in origin(driver)


def test_a_nan_that_is_made_of_infinities_names_both_lines():
    def driver(state, batch):
        large = jnp.exp(100 * batch["x"])
        small = jnp.sin(batch["x"]) * 0
        return state + comm.all_reduce((large * small).mean()), {}

    assert origin(driver) == "On worker 0 the first NaNs come from `mul` (+3), of infinities from `exp` (+1)."


def test_infinities_that_are_masked_out_are_passed_by():
    def driver(state, batch):
        masked = jax.nn.softmax(jnp.where(batch["x"] > 3, batch["x"], -jnp.inf))
        return state + comm.all_reduce((masked * jnp.log(batch["x"] - 9)).sum()), {}

    assert origin(driver) == "On worker 0 the first NaNs come from `log` (+2)."


@pytest.mark.parametrize("jit", [False, True])
def test_nans_of_the_batch_or_the_state_are_named(jit):
    def driver(state, batch):
        mean = (batch["x"] * state["w"]).mean()
        return state, {"mean": comm.all_reduce(mean)}

    wrapped = jax.jit(driver) if jit else driver
    bad = X.copy()
    bad[3] = np.nan
    with pytest.raises(ad.NonFiniteError, match=r"On worker 0 batch\['x'\] holds NaNs"):
        ad.Program(wrapped, {"w": 1.0}, {"x": bad}, global_batch=8).step()
    with pytest.raises(ad.NonFiniteError, match=r"On worker 0 state\['w'\] holds infinities"):
        ad.Program(wrapped, {"w": np.inf}, {"x": X}, global_batch=8).step()


def test_a_measurement_and_the_result_of_a_message_before():
    def measured(state, batch):
        return state + comm.all_reduce(batch["x"].mean() * mon.compute_seconds()), {}

    assert origin(measured) == "On worker 0 source 'compute_seconds' (+1) holds NaNs."

    def gathered(state, batch):
        seconds = comm.all_gather(mon.compute_seconds())
        return state + comm.all_reduce(batch["x"].mean() * seconds.sum()), {}

    assert origin(gathered) == "On worker 0 all_gather (+1) holds NaNs."


def test_the_worker_and_microbatch_are_named():
    def driver(state, batch):
        inverse = 1 / (batch["x"] - 8)
        return state + comm.all_reduce(inverse.mean()), {}

    assert origin(driver, workers=2, microbatch=1)[12:] == "the first infinities come from `div` (+1)."


def test_a_product_with_the_weight_that_overflows():
    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean() * 1e37, weight=batch["x"].sum()), {}

    assert "each is finite, but its product with the weight" in origin(driver)


def test_nans_of_a_loop_are_attributed_to_the_loops_line():
    def driver(state, batch):
        def body(total, x):
            return total / (x - 1), None

        total, _ = jax.lax.scan(body, 1.0, batch["x"])
        return state + comm.all_reduce(total), {}

    assert origin(driver, microbatch=None) == "On worker 0 the first infinities come from `scan` (+4)."


def test_effects_are_not_repeated_in_the_search():
    called = []

    def driver(state, batch):
        shape = jax.ShapeDtypeStruct((), np.float32)
        number = jax.experimental.io_callback(
            lambda x: called.append(float(x)) or np.float32(x), shape, batch["x"].mean()
        )
        return state + comm.all_reduce(jnp.log(-number)), {}

    assert "`io_callback` (+2) has an effect, and is not repeated" in origin(driver, workers=2)
    assert len([x for x in called if x]) == 2  # once per microbatch of the step


def test_an_error_in_the_search_does_not_block_other_processes(monkeypatch):
    def driver(state, batch):
        return state + comm.all_reduce(jnp.log(-batch["x"]).mean()), {}

    def broken(*args):
        raise MemoryError("all gone")

    monkeypatch.setattr("adaptive.runtime.nan_origin.nan_origin", broken)
    assert "their origin could not be found: MemoryError: all gone" in origin(driver)
