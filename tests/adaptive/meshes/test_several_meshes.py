"""Several workers that are meshes: all collectives, and all policies, give what workers on one device give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
import controllers as ctrl
import monitors as mon
from adaptive import operators
from adaptive.base.local_mesh import LocalMesh
from adaptive.base.values.arrays import numbers_of
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.meshes.test_worker_on_a_mesh import SPECS, TX, loss_of, make_data, mesh_of, state_on
from tests.problems import build, difference, stream
from tests.relaxed import relaxed_tx


@pytest.fixture(autouse=True)
def precise():
    with jax.enable_x64(True):
        yield


def workers(n, mesh=None, *, there=None):
    """A world of workers that run one after another, each on the whole mesh, or on one device."""
    world = LocalWorld(n, workers=there)
    world.local_mesh = None if mesh is None else LocalMesh(mesh)
    return world


def same_on_a_mesh(driver, state_of, steps=4, global_batch=48, **options):
    """Train on three workers with uneven batches, on a mesh and on one device. Returns the program on the mesh."""
    found = []
    for mesh in (None, mesh_of()):
        program = build(driver, state_of(mesh), make_data(), global_batch, world=workers(3, mesh), **options)
        reports = [program.step() for _ in range(steps)]
        found.append((jax.tree.map(numbers_of, program.state), [report.metrics for report in reports]))
    assert difference(*(state for state, _ in found)) < 1e-12
    for a, b in zip(*(jax.tree.leaves(metrics) for _, metrics in found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    return program


# --- collectives ------------------------------------------------------------------------------------------------------


def exchanging(state, batch):
    """Every collective of a mesh, on sharded and on other values; the result does not depend on the split."""
    lr = ad.hyperparameter("lr", 1e-2)
    ctrl.hook(slower, every=2)
    params = state["params"]
    loss, own = jax.value_and_grad(loss_of)(params, batch)
    mean, grads = comm.all_reduce((loss, own))
    first = ad.worker_index() == 0
    sent = comm.broadcast({name: jnp.where(first, leaf, 0.0) for name, leaf in params.items()})
    n = ad.batch_size().astype(float)
    rows = comm.all_gather({"loss": n * loss, "c": n * own["c"].sum(0), "examples": n})
    sums = jax.tree.map(lambda x: jnp.nansum(x, 0), rows)
    updates, opt = TX.update(grads, state["opt"], params)
    params = jax.tree.map(lambda p, u: p + 100 * lr * u, params, updates)
    return {
        "params": params,
        "opt": opt,
        "ema": jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["ema"], params),
        "sent": jax.tree.map(jnp.add, state["sent"], sent),
        "rows": state["rows"] + sums["c"] / sums["examples"],
    }, {
        "loss": mean,
        "loss of rows": sums["loss"] / sums["examples"],
        "largest": comm.all_reduce(loss, op="max"),
        "lr": lr,
        "ema": mon.ema(grads["b"], 0.5).sum(),
        "noise": mon.noise_scale(own, grads).scale,
    }


def slower(control):
    control.set_hyperparameters(lr=1e-2 / (1 + control.step))


def exchanged_state(mesh=None):
    state = state_on(mesh)
    copies = {name: jax.tree.map(jnp.copy, state["params"]) for name in ("ema", "sent")}
    return {**state, **copies, "rows": jnp.zeros(4)}


def test_every_collective_on_uneven_batches():
    program = same_on_a_mesh(exchanging, exchanged_state, steps=6, shares=[3, 2, 1])
    for name in ("params", "ema", "sent"):
        assert {k: leaf.sharding.spec for k, leaf in program.state[name].items()} == SPECS
    assert program.batch_sizes == (24, 16, 8)


def test_the_examples_of_all_workers_are_gathered_with_a_derivative():
    def contrastive(state, batch):
        def loss(params):
            x = jnp.tanh(batch["x"] @ params["a"])
            others = comm.gather_examples(x, 48)
            return jax.nn.logsumexp(x @ others.T / 40, axis=-1).mean()

        value, grads = comm.all_reduce(jax.value_and_grad(loss)(state))
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}

    same_on_a_mesh(contrastive, lambda mesh: state_on(mesh)["params"], shares=[3, 2, 1])


def test_leaves_of_every_kind():
    """A leaf over two axes, integers, a key, booleans, and an optimizer for each kind of leaf."""
    kinds = {"a": "adam", "b": "adam", "c": "sgd", "s": "none"}
    rates = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 5))
    each = {"adam": rates, "sgd": optax.sgd(0.1, momentum=0.9), "none": optax.set_to_zero()}
    tx = relaxed_tx(optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(each, kinds)))

    def mixed(state, batch):
        loss, grads = comm.all_reduce(jax.value_and_grad(loss_of)(state["params"], batch))
        updates, opt = tx.update(grads, state["opt"], state["params"])
        key, noise = jax.random.split(state["key"])
        flags = state["flags"] ^ jax.random.bernoulli(noise, 0.5, state["flags"].shape)
        seen, params = state["seen"].at[0].add(1), optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": key, "flags": flags, "seen": seen}, {"loss": loss}

    def state_of(mesh):
        params, seen = state_on(mesh)["params"], jnp.zeros((8, 3), jnp.int32)
        if mesh is not None:
            seen = jax.device_put(seen, NamedSharding(mesh, P(("fsdp", "tp"))))
        return {
            "params": params,
            "opt": tx.init(params),
            "key": jax.random.key(1),
            "flags": jnp.zeros(5, bool),
            "seen": seen,
        }

    program = same_on_a_mesh(mixed, state_of, shares=[3, 2, 1])
    assert program.state["seen"].sharding.spec == P(("fsdp", "tp"))


# --- policies ---------------------------------------------------------------------------------------------------------

EXAMPLES, WIDTH, GRANULE = 320, 8, 4
SECONDS_PER_EXAMPLE = np.array([1e-4, 4e-4, 2e-4, 1e-4])
ORDER = stream(EXAMPLES, 3, 20 * 128)
DATA = {"x": np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH))}


def adapted(w, batch):
    lr = ad.hyperparameter("lr", 0.05)
    size = ad.batch_size().astype(jnp.float32)
    previous = operators.operator_state("previous size", np.float32(np.nan), lambda before: (size, before))
    seconds = comm.all_gather(1e-3 + jnp.asarray(SECONDS_PER_EXAMPLE, jnp.float32)[ad.worker_index()] * previous)
    ctrl.hook(ctrl.balance(stretch_seconds=0), seconds, every=2)
    ctrl.hook(ctrl.schedule({0: 48, 8: 96, 14: 36}))
    ctrl.hook(ctrl.schedule(lr=lambda epoch: 0.05 / (1 + epoch), by="epochs"))
    ctrl.hook(lambda control: control.rescale(workers=4), every=10, name="grow")
    loss, grad = jax.value_and_grad(lambda w: jnp.square(batch["x"] - w[None]).mean())(w)
    loss, grad = comm.all_reduce((loss, grad))
    return w - lr * grad, {"loss": loss, "lr": lr}


def test_policies_keep_to_the_mesh_and_to_the_mathematics():
    mesh = mesh_of((GRANULE, 1))
    first = jax.device_put(jnp.zeros(WIDTH), NamedSharding(mesh, P("fsdp")))
    options = {"world": workers(4, mesh, there=3), "resizable": True, "deterministic": True}
    with build(adapted, first, DATA, 48, **options) as program:
        reports = [program.step() for _ in range(20)]
    assert {report.global_batch for report in reports} == {48, 96, 36}
    assert len({report.batch_sizes for report in reports}) > 4
    assert reports[-1].members == (0, 1, 2, 3)
    assert all(size % GRANULE == 0 for report in reports for size in report.batch_sizes)
    w, at = np.zeros(WIDTH), 0
    for report in reports:
        mean = DATA["x"][ORDER[at : at + report.global_batch]].mean(0)
        w, at = w - float(report.metrics["lr"]) * 2 / WIDTH * (w - mean), at + report.global_batch
    assert difference(program.state, w) < 1e-12
    assert program.state.sharding.spec == P("fsdp")


# --- strategies -------------------------------------------------------------------------------------------------------

SGD, OUTER = optax.sgd(0.05), optax.sgd(0.5, momentum=0.5, nesterov=True)
STRATEGIES = {
    "diloco": sync.diloco(SGD, OUTER, 2),
    "hybrid": sync.hybrid(sync.model_averaging(SGD, momentum=0.5), sync.synchronous(SGD)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_of_means_trains_on_shards(name):
    strategy = STRATEGIES[name]

    def driver(state, batch):
        state, loss = strategy.step(state, jax.value_and_grad(loss_of), batch)
        return state, {"loss": comm.all_reduce(loss)}

    options = {"shares": [3, 2, 1], "per_worker_state": strategy.per_worker_state}
    same_on_a_mesh(driver, lambda mesh: strategy.init(state_on(mesh)["params"]), **options)
