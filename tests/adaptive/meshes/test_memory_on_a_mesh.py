"""What each device of a mesh holds while a program is built, steps, saves, is restored and joins: its part."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import collectives as comm
from adaptive.program.explain import memory_needed
from tests.adaptive.meshes.test_worker_on_a_mesh import mesh_of
from tests.device_memory import Watch
from tests.problems import build
from tests.relaxed import relaxed_tx

WIDTH = 256
WHOLE = 4 * WIDTH**2  # bytes of a parameter, and of a message's part by itself
SPECS = {"both": P("fsdp", "tp"), "other": P("tp", "fsdp"), "one": P("fsdp")}  # "one" has a copy on each of two
PART = WHOLE // 4 + WHOLE // 4 + WHOLE // 2  # of all parameters on a device
LARGEST = WHOLE // 2
SMALL = 20_000  # bytes of batches, counts and metrics
TX = relaxed_tx(optax.adam(1e-2))
DATA = {"x": np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)}


def driver(state, batch):
    params, opt = state

    def loss_of(p):
        return jnp.square(jnp.tanh(jnp.tanh(batch["x"] @ p["both"]) @ p["other"]) @ p["one"]).mean()

    loss, grads = comm.all_reduce(jax.value_and_grad(loss_of)(params))
    updates, opt = TX.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": loss}


def state_on(mesh):
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    keys = dict(zip(SPECS, jax.random.split(jax.random.key(0), len(SPECS)), strict=True))
    made = jax.jit(
        lambda: {k: jax.random.normal(key, (WIDTH, WIDTH)) / 16 for k, key in keys.items()}, out_shardings=shardings
    )
    params = made()
    return params, TX.init(params)


def test_each_device_holds_its_part_in_every_phase():
    mesh = mesh_of()
    jax.block_until_ready(state_on(mesh))
    everything = Watch()
    phases = {}

    def phase(name, work):
        with Watch(everything._before) as phases[name]:
            return work()

    with comm.SoloWorld(mesh=mesh) as world:
        program = phase("build", lambda: build(driver, lambda: state_on(mesh), DATA, 16, world=world, microbatch=8))
        program.step()
        phase("step", program.step)
        kept = phase("save", program.checkpoint)
        program.step()
        phase("restore", lambda: program.restore(kept))
        for leaf, old in zip(jax.tree.leaves(program.state), jax.tree.leaves(kept["state"]), strict=True):
            np.testing.assert_array_equal(leaf, old)
        workers = program._parts.engine.workers
        exported = [2 * array for array in workers.export()]
        rooms = workers.receive_buffers()
        assert [room.shape for room in rooms] == [array.shape for array in exported]
        phase("join", lambda: workers.adopt(exported))
        np.testing.assert_array_equal(program.state[0]["one"], 2 * kept["state"][0]["one"])
        program.step()
    state = 3 * PART
    parts = 3 * WHOLE // 4  # of a message: each element is on one device
    most = {
        "build": state + LARGEST,
        "step": state + 2 * parts,  # two microbatches
        "save": state,
        "restore": state,
        "join": state + 2 * LARGEST,
    }
    for name, watch in phases.items():
        assert watch.most <= most[name] + SMALL, name
        assert watch.most >= state, name  # something was seen
        assert watch.largest <= LARGEST, name


def test_explain_counts_what_is_on_one_device():
    mesh = mesh_of()
    with comm.SoloWorld(mesh=mesh) as world, build(driver, state_on(mesh), DATA, 16, world=world) as program:
        needed = {n.what: n.nbytes for n in memory_needed(program._parts.engine, program._parts.data, (16,))}
        assert needed["state"] == 3 * PART + 4
        assert needed["batches"] == 2 * 8 * WIDTH * 4
        assert needed["parts of messages"] == pytest.approx(3 * WHOLE // 4, abs=200)
        assert "for each device of a worker" in program.explain()
