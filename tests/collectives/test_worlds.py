"""What every world promises. Run over worlds of this process, and by test_mpi.py on the ranks of an mpirun."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.channel import SentMessage
from adaptive.base.errors import CollectiveError
from adaptive.base.world import World
from adaptive.runtime.local_world import LocalWorld
from collectives._neighbor_mean import Matchings, RandomMatchings, Ring
from collectives._robust import GeometricMedian, Median
from collectives.compression._wire import Narrow

SHAPES = [(), (1,), (5,), (3, 4), (2, 1, 3, 5), (200_003,), (3, 100, 701)]  # the last two are more than one piece
NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum}
NO_STATUS = np.zeros(0, np.float32)


def exchange(world, values, ops, status=NO_STATUS):
    """Exchange `values(worker)`, a list of arrays, as parts 1…; returns, by worker, what arrived for them."""
    parts = [
        [jax.device_put(x, device) for x in (np.zeros(1 + len(status), status.dtype), *values(worker))]
        for worker, device in zip(world.workers, world.devices, strict=True)
    ]
    results, status = world.exchange(SentMessage(parts, status), ["sum", *ops])
    return [row[1:] for row in results], status


def reduced(world, values, ops):
    """What numpy makes of all the workers' values."""
    columns = zip(*(values(worker) for worker in range(world.size)), strict=True)
    return [NUMPY[op].reduce(np.stack(column), axis=0) for op, column in zip(ops, columns, strict=True)]


def on_all_workers(world, row):
    """The bytes of every worker's results, worker by worker."""
    own = [b"".join(np.asarray(x).tobytes() for x in results) for results in row]
    lengths = {len(b) for b in own}
    assert len(lengths) == 1
    together = world.all_gather_bytes(b"".join(own))
    return [chunk[i : i + len(own[0])] for chunk in together for i in range(0, len(chunk), len(own[0]))]


def test_it_is_a_world_that_numbers_its_workers_in_rank_order(world):
    assert isinstance(world, World)
    assert len(world.devices) == len(world.workers)
    assert len(set(world.devices)) == len(world.devices)
    assert 0 <= world.rank < world.processes <= world.size
    ranges = [
        tuple(map(int, r.split()))
        for r in world.all_gather_bytes(f"{world.workers.start} {world.workers.stop}".encode())
    ]
    assert [w for start, stop in ranges for w in range(start, stop)] == list(range(world.size))
    assert ranges[world.rank] == (world.workers.start, world.workers.stop)


@pytest.mark.parametrize("dtype", ["float32", "uint32", "int8", "int16", "float64", "int64"])
def test_sums_and_extremes_of_any_shape(world, dtype):
    shapes = SHAPES if dtype == "float32" else SHAPES[::3]

    def values(worker):
        rng = np.random.default_rng(worker)
        return [rng.integers(0, 20, shape).astype(dtype) for shape in shapes for _ in range(2)]

    ops = list(itertools.islice(itertools.cycle(NUMPY), 2 * len(shapes)))  # each shape by two of the three
    wide = np.dtype(dtype).itemsize == 8
    with jax.enable_x64(True) if wide else nullcontext():
        rows, _ = exchange(world, values, ops)
        for device, row in zip(world.devices, rows, strict=True):
            for found, expected in zip(row, reduced(world, values, ops), strict=True):
                assert found.devices() == {device}
                assert (found.dtype, found.shape) == (dtype, expected.shape)
                np.testing.assert_array_equal(found, expected)


def test_results_are_bitwise_equal_on_all_workers_and_in_every_run(world):
    def values(worker):
        rng = np.random.default_rng(worker)
        return [rng.normal(size=shape).astype(np.float32) * 10.0 ** rng.integers(-9, 9) for shape in SHAPES]

    ops = ["sum"] * len(SHAPES)
    first, _ = exchange(world, values, ops)
    before = on_all_workers(world, first)
    assert len(before) == world.size
    assert len(set(before)) == 1
    assert on_all_workers(world, exchange(world, values, ops)[0]) == before
    for found, expected in zip(first[0], reduced(world, values, ops), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_extremes_keep_nans_and_infinities_of_any_worker(world):
    last = world.size - 1

    def values(worker):
        # MPI's extremes keep a NaN or drop it as the place, the length and the order of ranks would have it.
        nans = np.where(np.arange(101) % (world.size + 1) == worker, np.nan, 0).astype(np.float32)
        some = np.array([-np.inf, np.inf, -1.0, 0.0, 2.5], np.float32) if worker == last else np.zeros(5, np.float32)
        return [nans, nans, some, some, np.float32(-worker)]

    ops = ["max", "min", "max", "min", "max"]
    rows, _ = exchange(world, values, ops)
    for found, expected in zip(rows[0], reduced(world, values, ops), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert len(set(on_all_workers(world, rows))) == 1


def rows_of(values, world, part):
    return np.stack([values(worker)[part] for worker in range(world.size)])


def test_sliced_reduction_equals_whole_reduction(world):
    def values(worker):
        rng = np.random.default_rng(worker)
        weighed = np.concatenate([[1 + worker], rng.normal(size=1000)]).astype(np.float32)
        return [weighed, weighed, rng.normal(size=(3, 100, 701)).astype(np.float32), np.ones(1, np.float32)]

    ops = [Median(), GeometricMedian(), Narrow("bfloat16"), Narrow("bfloat16", stochastic=True)]
    rows, _ = exchange(world, values, ops)
    assert len(set(on_all_workers(world, rows))) == 1
    first, second, narrow, tiny = (np.asarray(x) for x in rows[0])
    apart = rows_of(values, world, 0)
    local = LocalWorld(world.size)
    parts = [[jnp.zeros(1), *map(jnp.asarray, values(worker))] for worker in range(world.size)]
    (_, *expected), *_ = local.exchange(SentMessage(parts, NO_STATUS), ["sum", *ops])[0]
    np.testing.assert_array_equal(first[1:], expected[0][1:])
    np.testing.assert_allclose(second[1:], expected[1][1:], rtol=1e-5, atol=1e-6)
    if world.size == 1:
        np.testing.assert_array_equal(first, apart[0])
        return
    assert ((first[1:] >= apart[:, 1:].min(0)) & (first[1:] <= apart[:, 1:].max(0))).all()
    total = rows_of(values, world, 2).astype(jnp.bfloat16).astype(np.float32).sum(0)
    np.testing.assert_allclose(narrow, total, rtol=2**-7, atol=2**-9)
    assert np.array_equal(narrow, narrow.astype(jnp.bfloat16).astype(np.float32))
    assert tiny == world.size


def test_each_worker_averages_with_its_neighbors(world):
    def values(worker):
        return [np.full((3, 4), worker + 1.0, np.float32), np.full(70_001, -worker, np.float32)]

    for step in (1, 2):
        for schedule in (RandomMatchings(3), Ring(), Matchings((((0, world.size - 1),),))):
            if world.size == 1 and isinstance(schedule, Matchings):
                continue
            parts = [
                [jax.device_put(x, device) for x in (np.zeros(1, np.float32), *values(worker))]
                for worker, device in zip(world.workers, world.devices, strict=True)
            ]
            results, _ = world.exchange(SentMessage(parts, NO_STATUS, step=step), ["sum", schedule, schedule])
            weights = schedule.weights(step, world.members)
            for worker, device, row in zip(world.workers, world.devices, results, strict=True):
                shares = weights.get(worker, {worker: 1.0})
                assert sum(shares.values()) == pytest.approx(1)
                for found, part in zip(row[1:], (0, 1), strict=True):
                    assert found.devices() == {device}
                    expected = sum(share * values(other)[part] for other, share in shares.items())
                    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_part_0_carries_the_status_of_every_process(world):
    status = np.array([1.0, world.rank, 0.5], np.float32)
    parts = [
        [jax.device_put(np.array([worker, 10, 777, 777, 777], np.float32), device)]  # the last three are free
        for worker, device in zip(world.workers, world.devices, strict=True)
    ]
    results, total = world.exchange(SentMessage(parts, status), ["sum"])
    p, n = world.processes, world.size
    np.testing.assert_array_equal(total, [p, p * (p - 1) / 2, p / 2])
    assert total.dtype == status.dtype
    for row in results:
        np.testing.assert_array_equal(row[0][:2], [n * (n - 1) / 2, 10 * n])


def test_results_are_valid_until_the_next_message_of_their_layout(world):
    def values(step):
        return lambda worker: [np.full(7, step + worker, np.float32), np.full((300, 700), step, np.float32)]

    def expect(rows, step):
        for row in rows:
            for found, expected in zip(row, reduced(world, values(step), ["sum", "sum"]), strict=True):
                np.testing.assert_array_equal(found, expected)

    for step in range(5):
        results, _ = exchange(world, values(step), ["sum", "sum"])
        expect(results, step)
        others, _ = exchange(world, lambda worker, step=step: [np.full(8 + step, -1, np.float32)], ["sum"])
        world.barrier()
        expect(results, step)
        np.testing.assert_array_equal(others[0][0], np.full(8 + step, -world.size, np.float32))


def test_messages_of_many_layouts_are_independent(make_world, monkeypatch):
    monkeypatch.setattr("adaptive.base.world.KEPT_CHANNELS", 3)

    def values(n):
        return lambda worker: [np.arange(n, dtype=np.float32) + worker]

    with make_world() as world:
        results = {n: exchange(world, values(n), ["sum"])[0] for n in range(1, 7)}
        for n, rows in results.items():
            for row in rows:
                np.testing.assert_array_equal(row[0], reduced(world, values(n), ["sum"])[0])
        assert len(world._channels) == 3


def test_channels_of_equal_shape_are_independent(world):
    def send(number, channel):
        parts = [[jax.device_put(np.full(9, number, np.float32), device)] for device in world.devices]
        return world.exchange(SentMessage(parts, NO_STATUS), ["sum"], channel)[0]

    for step in range(3):
        results = [send(10 * step + channel, channel) for channel in range(4)]
        for channel, rows in enumerate(results):
            for row in rows:
                np.testing.assert_array_equal(row[0], np.full(9, world.size * (10 * step + channel)))


def test_a_donated_result_does_not_affect_the_next_exchange(world):
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    for step in range(5):
        rows, _ = exchange(world, lambda worker, step=step: [np.full((30, 7), step, np.float32)], ["sum"])
        for row in rows:
            np.testing.assert_array_equal(double(row[0]), np.full((30, 7), 2 * step * world.size))


def test_share_lists_every_process_by_rank(world):
    assert world.all_gather_bytes(b"%d" % world.rank) == [b"%d" % rank for rank in range(world.processes)]
    lengths = [len(value) for value in world.all_gather_bytes(b"x" * (world.rank * 100_000))]
    assert lengths == [rank * 100_000 for rank in range(world.processes)]


# --- as the world of eager collectives --------------------------------------------------------------------------------


def of_workers(world, value):
    """`value(rank)` of the process that carries each worker: eagerly, all workers of a process hold what it holds."""
    counts = [int(count) for count in world.all_gather_bytes(b"%d" % len(world.workers))]
    return [value(rank) for rank, count in enumerate(counts) for _ in range(count)]


def test_an_eager_mean_weighs_its_workers(world):
    def value(rank):
        return {"loss": jnp.float32(rank), "grads": [jnp.arange(4.0) * rank, np.full((2, 2), 1.0 + rank, np.float32)]}

    mean = comm.all_reduce(value(world.rank), weight=3 * world.rank + 1)
    weights = np.array(of_workers(world, lambda rank: 3 * rank + 1))
    leaves = [jax.tree.leaves(v) for v in of_workers(world, value)]
    assert jax.tree.structure(mean) == jax.tree.structure(value(0))
    for found, column in zip(jax.tree.leaves(mean), zip(*leaves, strict=True), strict=True):
        np.testing.assert_allclose(found, np.average(np.stack(column), axis=0, weights=weights), rtol=1e-6)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_eager_sums_and_extremes(world, op):
    def value(rank):
        return jnp.array([1.5, -2.0, 0.0]) * (rank + 1), jnp.int32(7 - rank)

    floats, integer = comm.all_reduce(value(world.rank), op=op)
    np.testing.assert_array_equal(floats, NUMPY[op].reduce(of_workers(world, lambda rank: np.asarray(value(rank)[0]))))
    assert integer == NUMPY[op].reduce(of_workers(world, lambda rank: 7 - rank))
    assert integer.dtype == jnp.int32


def test_an_eager_gather_has_a_row_per_worker(world):
    rows = comm.all_gather({"rank": jnp.int32(world.rank), "odd": np.array([world.rank % 2 == 1])})
    np.testing.assert_array_equal(rows["rank"], of_workers(world, lambda rank: rank))
    np.testing.assert_array_equal(rows["odd"][:, 0], of_workers(world, lambda rank: rank % 2 == 1))
    assert rows["odd"].dtype == jnp.bool_


def test_an_eager_broadcast_takes_the_roots_value(world):
    for root, value in enumerate(of_workers(world, lambda rank: rank)):
        found = comm.broadcast({"x": jnp.full((2, 2), world.rank), "nan": jnp.nan if root else 1.0}, root=root)
        np.testing.assert_array_equal(found["x"], np.full((2, 2), value))
        np.testing.assert_array_equal(found["nan"], np.nan if root else 1.0)
    with pytest.raises(CollectiveError, match=f"no worker root={world.size}"):
        comm.broadcast(1.0, root=world.size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions_are_weighed_without_rounding(world, dtype):
    x = jnp.asarray([1.0, 3.0], dtype)
    mean = comm.all_reduce(x, weight=257)  # 256 in bfloat16
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, x)


def test_an_eager_mean_needs_a_weight_where_there_are_several_workers(world):
    if world.size == 1:
        assert comm.all_reduce(2.5) == 2.5
        return
    with pytest.raises(CollectiveError, match=r"(?s)all_reduce outside a program \(test_worlds.py:\d+\).*weight=") as e:
        comm.all_reduce(2.5)
    assert "NaN" not in str(e.value)


def test_a_world_is_the_current_one_inside_its_block(world, make_world):
    n = len(comm.all_gather(0))
    assert n == world.size
    with comm.SoloWorld() as solo:
        assert len(comm.all_gather(0)) == 1
        with make_world() as inner:
            assert len(comm.all_gather(0)) == inner.size == n
        with solo:  # entered twice, left twice, closed once
            assert len(comm.all_gather(0)) == 1
        solo.barrier()
    assert len(comm.all_gather(0)) == n


def test_a_closed_world_raises(make_world):
    with make_world() as closed:
        pass
    closed.close()
    for use in (
        closed.barrier,
        lambda: closed.all_gather_bytes(b""),
        lambda: exchange(closed, lambda worker: [], []),
        closed.__enter__,
    ):
        with pytest.raises(CollectiveError, match=r"is used \(test_worlds.py:\d+\) after it was closed"):
            use()


# --- as the world of a program ----------------------------------------------------------------------------------------


def test_a_program_sends_any_dtype(world):
    def driver(state, batch):
        me, x = ad.worker_index(), batch["x"]
        metrics = {
            "odd": comm.all_gather(me % 2 == 1),
            "first": comm.broadcast(me == 0),
            "half": comm.all_reduce(x.mean().astype(jnp.bfloat16)),
            "ranks": comm.all_reduce(me, op="sum"),
            "most": comm.all_reduce(x.max(), op="max"),
            "complex": comm.all_reduce(1 + 1j * me.astype(complex), op="sum"),
            "complex mean": comm.all_reduce(x.mean().astype(complex) * (1 - 2j)),
            "complex rows": comm.all_reduce(jnp.exp(1j * x.astype(complex)).mean() * jnp.ones((130, 260), complex)),
            "empty": comm.all_reduce({"x": x[:0], "y": x.mean()}),
            "empty rows": comm.all_gather(jnp.zeros((2, 0), jnp.bfloat16) * x.mean().astype(jnp.bfloat16)),
            "empty root's": comm.broadcast(x[:0], root=n - 1),
        }
        return state + comm.all_reduce(x.mean()), metrics

    n = world.size
    data = {"x": np.arange(8.0 * n, dtype=np.float32)}
    options = {"shares": range(1, n + 1), "microbatch": 3, "resizable": False}
    with ad.Program(driver, jnp.zeros(()), data, global_batch=8 * n, world=world, **options) as program:
        metrics = program.step().metrics
        np.testing.assert_array_equal(metrics["odd"], np.arange(n) % 2 == 1)
        assert metrics["odd"].dtype == metrics["first"].dtype == jnp.bool_
        assert metrics["first"]
        assert metrics["half"].dtype == jnp.bfloat16
        np.testing.assert_allclose(metrics["half"].astype(jnp.float32), data["x"].mean(), rtol=1e-2)
        assert metrics["ranks"] == n * (n - 1) // 2
        assert metrics["most"] == 8 * n - 1
        assert metrics["complex"] == n + 1j * n * (n - 1) / 2
        np.testing.assert_allclose(metrics["complex mean"], data["x"].mean() * (1 - 2j), rtol=1e-6)
        np.testing.assert_allclose(
            metrics["complex rows"], np.exp(1j * data["x"]).mean() + np.zeros((130, 260)), atol=1e-6
        )
        assert metrics["complex mean"].dtype == metrics["complex rows"].dtype == jnp.complex64
        assert (metrics["empty"]["x"].shape, metrics["empty"]["x"].dtype) == ((0,), jnp.float32)
        np.testing.assert_allclose(metrics["empty"]["y"], data["x"].mean(), rtol=1e-6)
        assert (metrics["empty rows"].shape, metrics["empty rows"].dtype) == ((n, 2, 0), jnp.bfloat16)
        assert metrics["empty root's"].shape == (0,)
        assert all(c.value.aval.size for message in program._parts.plan.messages for c in message)
        np.testing.assert_allclose(program.state, data["x"].mean(), rtol=1e-6)
