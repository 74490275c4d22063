"""A worker that is a mesh of devices: its states are sharded, and equal those of one device that holds everything."""

from __future__ import annotations

from functools import partial

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.base.local_mesh import LocalMesh
from collectives.worlds.reducing.sharded_parts import ShardedParts
from tests.problems import build, difference, warm
from tests.relaxed import relaxed_tx

FEATURES, HIDDEN, OUT = 12, 192, 4  # a matrix of HIDDEN² doubles is a part of a message by itself
SPECS = {"a": P("fsdp", "tp"), "b": P("tp", "fsdp"), "c": P("fsdp"), "s": P()}
TX = relaxed_tx(optax.adam(1e-2))


@pytest.fixture(autouse=True)
def precise():
    with jax.enable_x64(True):
        yield


def mesh_of(shape=(2, 2), kind=AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("fsdp", "tp"), devices=jax.local_devices(), axis_types=(kind,) * 2)


def make_data(examples: int = 320):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(examples, FEATURES)), "y": rng.normal(size=(examples, OUT))}


def init():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"a": (FEATURES, HIDDEN), "b": (HIDDEN, HIDDEN), "c": (HIDDEN, OUT)}
    params = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return params | {"s": jnp.ones(6)}


def state_on(mesh=None):
    """Parameters over a mesh, by default on one device; the optimizer's state is not on the mesh."""
    shardings = None if mesh is None else {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.jit(init, out_shardings=shardings)()
    return {"params": params, "opt": jax.jit(TX.init)(params)}


def loss_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["a"] / 8 * params["s"].sum())
    return jnp.square(jnp.tanh(hidden @ params["b"] / 16) @ params["c"] - batch["y"]).mean()


def driver(state, batch):
    loss, own = jax.value_and_grad(loss_of)(state["params"], batch)
    loss, grads = comm.all_reduce((loss, own))
    updates, opt = TX.update(grads, state["opt"], state["params"])
    metrics = {"loss": loss, "noise": mon.noise_scale(own, grads), "norm": optax.tree.norm(grads)}
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, metrics


def trained(state, world, steps=6, made=driver, **options):
    program = build(made, state, make_data(), 32, world=world, **options)
    reports = [program.step() for _ in range(steps)]
    return program, reports


@pytest.fixture(scope="module")
def whole():
    """What one device computes that holds everything."""
    with jax.enable_x64(True), comm.SoloWorld() as world:
        program, reports = trained(state_on(), world)
        yield jax.device_get(program.state), reports
        program.close()


@pytest.mark.parametrize(
    ("shape", "of_world", "options"),
    [
        ((2, 2), {}, {}),
        ((1, 4), {"batch_axes": ()}, {}),  # whole batches on each
        ((4, 1), {}, {"microbatch": 2}),  # which do not divide the mesh
        *(pytest.param(shape, {}, {}, marks=pytest.mark.long) for shape in ((4, 1), (1, 4))),
    ],
)
def test_a_mesh_computes_what_one_device_does(whole, shape, of_world, options):
    state, reports = whole
    mesh = mesh_of(shape)
    with comm.SoloWorld(mesh=mesh, **of_world) as world:
        program, found = trained(state_on(mesh), world, **options)
    assert difference(jax.device_get(program.state), state) < 1e-12
    opt = program.state["opt"][0]
    for tree in (program.state["params"], opt.mu, opt.nu):
        assert {name: leaf.sharding.spec for name, leaf in tree.items()} == SPECS
    if options:  # the noise scale of microbatches is another estimate
        return
    pairs = zip(jax.tree.leaves([r.metrics for r in found]), jax.tree.leaves([r.metrics for r in reports]), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_a_raveled_gradient_is_reduced_as_the_pytree_is(whole):
    def raveled(state, batch):
        flat, as_tree = jax.flatten_util.ravel_pytree(jax.grad(loss_of)(state["params"], batch))
        updates, opt = TX.update(as_tree(comm.all_reduce(flat)), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    mesh = mesh_of()
    with comm.SoloWorld(mesh=mesh) as world:
        program, _ = trained(state_on(mesh), world, made=raveled)
    assert difference(jax.device_get(program.state), whole[0]) < 1e-12


def test_a_worker_sends_each_element_once():
    mesh = mesh_of()
    with comm.SoloWorld(mesh=mesh) as world:
        context = trained(state_on(mesh), world, steps=1)[0]._parts.engine.context
        for number, layout in enumerate(context.layouts):
            pieces = ShardedParts(context.placements[0].specs(number, layout), world.local_mesh.whole).layout
            assert sum(np.prod(p.shape, dtype=int) * p.dtype.itemsize for p in pieces) == layout.nbytes
            assert (HIDDEN // 2, HIDDEN // 2) in [p.shape for p in pieces]


def test_a_kernel_needs_no_more_memory_than_by_hand():
    mesh, state = mesh_of(), state_on(mesh_of())["params"]
    shardings = jax.tree.map(lambda x: x.sharding, state)

    def descending(params, batch):
        grads = comm.all_reduce(jax.grad(loss_of)(params, batch))
        return jax.tree.map(lambda p, g: p - g, params, grads), {}

    def by_hand(params, batch):
        return jax.lax.with_sharding_constraint(jax.grad(loss_of)(params, batch), shardings)

    with comm.SoloWorld(mesh=mesh) as world:
        program, _ = trained(state, world, made=descending, steps=1)
        ours = program._parts.engine.kernels.kernel(0, 32, 0).run.memory_analysis()
    batch = jax.device_put(jax.tree.map(lambda x: x[:32], make_data()), NamedSharding(mesh, P("fsdp")))
    theirs = jax.jit(by_hand).lower(state, batch).compile().memory_analysis()
    assert ours.temp_size_in_bytes <= 1.05 * theirs.temp_size_in_bytes


def test_no_kernel_gathers_a_parameter_that_only_its_shards_need():
    mesh = mesh_of()
    with comm.SoloWorld(mesh=mesh) as world:
        program, _ = trained(state_on(mesh), world, steps=1)
        update = program._parts.engine.context.programs["final", 0, 0]
        assert f"f64[{HIDDEN},{HIDDEN}]" not in update.run.as_text()


def test_a_checkpoint_moves_between_meshes(whole, tmp_path):
    first = mesh_of()
    with comm.SoloWorld(mesh=first) as world:
        program, _ = trained(state_on(first), world, steps=3)
        checkpoint = program.checkpoint()
    for mesh in (mesh_of((4, 1)), None):
        with comm.SoloWorld(mesh=mesh) as world:
            program = build(driver, state_on(mesh), make_data(), 32, world=world)
            program.restore(checkpoint)
            for _ in range(3):
                program.step()
            assert difference(jax.device_get(program.state), whole[0]) < 1e-12
            if mesh is not None:
                assert program.state["params"]["b"].sharding.spec == SPECS["b"]


def test_evaluation_of_a_sharded_state_on_batches_of_any_size():
    mesh, data = mesh_of(), make_data(37)
    with comm.SoloWorld(mesh=mesh) as world:
        program, _ = trained(state_on(mesh), world, steps=1)
        value = program.evaluate(lambda state, batch: loss_of(state["params"], batch), data, batch=8)
        expected = loss_of(jax.device_get(program.state["params"]), data)
    assert value == pytest.approx(float(expected), rel=1e-12)


def test_sizes_are_multiples_of_the_parts_of_a_batch():
    mesh = mesh_of((4, 1))
    with comm.SoloWorld(mesh=mesh) as world:
        program = build(driver, state_on(mesh), make_data(), 32, world=world, resizable=True)
        warm(program)
        program.rescale(global_batch=44)
        program.step()
        assert program.global_batch == 44
        with pytest.raises(ad.BatchSizeError, match=r"not a multiple of 4, which .* mesh"):
            build(driver, state_on(mesh), make_data(), 30, world=world)


def test_a_driver_may_name_shardings():
    mesh = mesh_of()

    def constrained(state, batch):
        rows = NamedSharding(mesh, P("fsdp"))
        batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), batch)
        return driver(state, batch)

    with comm.SoloWorld(mesh=mesh) as world:
        trained(state_on(mesh), world, made=constrained, steps=1)
    with comm.SoloWorld() as world, pytest.raises(ad.DriverError, match=r"comm.world\(mesh=mesh\)"):
        trained(state_on(), world, made=constrained)


def test_a_mean_over_workers_within_the_model():
    mesh = mesh_of()

    def normalized(state, batch):
        def loss(w):
            y = batch["x"] @ w
            y = y - jax.lax.pmean(y.mean(0, keepdims=True), "workers")
            return jnp.square(y).mean()

        value, grad = comm.all_reduce(jax.value_and_grad(loss)(state))
        return state - 0.1 * grad, {"loss": value}

    found = []
    for where in (mesh, None):
        with comm.SoloWorld(mesh=where) as world:
            w = jnp.ones((FEATURES, HIDDEN)) / 8
            state = w if where is None else jax.device_put(w, NamedSharding(where, P(None, "fsdp")))
            program, _ = trained(state, world, made=normalized)
            found.append(jax.device_get(program.state))
    assert difference(*found) < 1e-12


def test_a_value_that_is_not_finite_names_its_leaf_and_line():
    mesh = mesh_of()

    def wrong(state, batch):
        loss, grads = comm.all_reduce(jax.value_and_grad(loss_of)(state, batch))
        grads = comm.all_reduce({"b": jnp.log(state["b"] - 1e3) * batch["y"].mean()})
        return jax.tree.map(lambda p, g: p - g, state, state | grads), {"loss": loss}

    with comm.SoloWorld(mesh=mesh) as world:
        program = build(wrong, state_on(mesh)["params"], make_data(), 32, world=world)
        with pytest.raises(ad.NonFiniteError, match=r"\['b'\].*\n.*log"):
            program.step()
        assert program.state["b"].sharding.spec == SPECS["b"]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mesh": "fsdp"}, "must be a jax.sharding.Mesh"),
        ({"mesh": partial(mesh_of, kind=AxisType.Explicit)}, r"AxisType.Auto,\) \* 2"),
        ({"mesh": mesh_of, "batch_axes": "data"}, "the mesh has the axes 'fsdp', 'tp'"),
        ({"mesh": mesh_of, "devices": jax.devices}, "exclude each other"),
        ({"batch_axes": "fsdp"}, "without mesh="),
    ],
)
def test_meshes_that_no_worker_can_be(arguments, text):
    made = {name: value() if callable(value) else value for name, value in arguments.items()}
    with pytest.raises(ad.CollectiveError, match=text):
        comm.world(**made)


def test_a_state_over_another_mesh():
    other = jax.make_mesh((2,), ("x",), devices=jax.local_devices()[:2], axis_types=(AxisType.Auto,))
    state = jax.device_put(jnp.ones((4, 4)), NamedSharding(other, P("x")))
    with (
        comm.SoloWorld(mesh=mesh_of()) as world,
        pytest.raises(ad.DriverError, match=r"state is sharded .* comm.world"),
    ):
        build(lambda s, b: (comm.all_reduce(s), {}), state, make_data(), 32, world=world)


@pytest.mark.parametrize(
    ("exchange", "name"),
    [
        (partial(comm.all_reduce, op="median"), "all_reduce"),
        (partial(comm.all_reduce, wire="4bit"), "all_reduce"),
        (comm.neighbor_mean, "neighbor_mean"),
        (comm.asynchronous_mean, "asynchronous_mean"),
    ],
)
def test_exchanges_of_whole_values(exchange, name):
    def exchanging(state, batch):
        grad = jax.grad(lambda w: jnp.square(batch["x"] @ w).mean())(state)
        return exchange(state - grad), {"loss": comm.all_reduce(grad.sum())}

    mesh = mesh_of()
    state = jax.device_put(jnp.ones((FEATURES, 4)), NamedSharding(mesh, P("fsdp")))
    with (
        comm.SoloWorld(mesh=mesh) as world,
        pytest.raises(ad.DriverError, match=rf"{name}.* not available where a worker is a mesh(?s:.*)sync\.diloco"),
    ):
        build(exchanging, state, make_data(), 32, world=world, per_worker_state=lambda state: state)


def test_parts_are_cut_over_each_axis_that_divides_them():
    mesh = LocalMesh(mesh_of())
    for spec, shape, cut in [
        (P(), (8, 6), P(("fsdp", "tp"))),
        (P("fsdp"), (8, 6), P(("fsdp", "tp"))),
        (P("fsdp"), (6, 8), P("fsdp", "tp")),
        (P(), (3, 5), P()),
        (P("tp", "fsdp"), (4, 4), P("tp", "fsdp")),
    ]:
        assert mesh.cut(NamedSharding(mesh.mesh, spec), shape).is_equivalent_to(NamedSharding(mesh.mesh, cut), 2)
