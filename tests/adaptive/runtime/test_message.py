"""What goes into a message comes out as the weighted mean, sum or extreme over all workers and all of their calls."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.extend.core import Var

from adaptive.graph.plan import Contribution, Scope
from adaptive.operators.collectives import Collective
from adaptive.runtime import message as _message
from adaptive.runtime.message import accumulate, lay_out, lay_out_all, neutral_parts, pack, unpack
from collectives._all_gather import Gather
from collectives._broadcast import Broadcast
from collectives._reduce import Reduce

LARGE = 40  # bytes from which on a leaf is large, in these tests
STATUS = 5
SHAPES = [(), (3,), (3, 4)]  # few, since each is compiled for
FLOATS = ["float16", "bfloat16", "float32"]
DTYPES = [*FLOATS, "int32", "uint8", "int16", "float64", "int64"]  # the last two under x64 only


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch):
    monkeypatch.setattr(_message, "LARGE_BYTES", LARGE)


@dataclass(frozen=True)
class Leaf:
    """What a test puts into a message, before it is known how many workers there are."""

    dtype: str
    shape: tuple[int, ...]
    kind: str = "reduce"
    op: str = "mean"
    root: int = 0
    scope: Scope = Scope.MICROBATCH
    weight: str = "examples"  # which of the weights, for a mean

    def how(self, workers: int) -> Collective:
        return {"reduce": Reduce(self.op), "gather": Gather(), "broadcast": Broadcast(self.root % workers)}[self.kind]


def variable(shape, dtype):
    return Var(jax.core.ShapedArray(shape, np.dtype(dtype)))


def contributions(leaves, workers):
    weights = {name: variable((), np.float32) for name in ("examples", "tokens")}
    found = []
    for number, leaf in enumerate(leaves):
        shape = (workers, *leaf.shape) if leaf.kind == "gather" else leaf.shape
        how = leaf.how(workers)
        found.append(
            Contribution(
                name=f"leaf {number}",
                how=how,
                value=variable(leaf.shape, leaf.dtype),
                weight=weights[leaf.weight] if how.weighted else None,
                result=variable(shape, leaf.dtype),
                scope=leaf.scope,
                line="",
            )
        )
    return found


def draw_value(rng, leaf):
    if np.dtype(leaf.dtype).kind in "iu":
        return rng.integers(0, 8, leaf.shape).astype(leaf.dtype)
    return rng.normal(size=leaf.shape).astype(leaf.dtype)


def send(layout, values, weights):
    """`values[worker][call]` by contribution, `weights[worker][call]` by name: what arrives."""
    arrived = None
    for worker, calls in enumerate(values):
        for call, contributed in enumerate(calls):
            used = [
                None if c.weight is None else jnp.float32(weights[worker][call][name])
                for c, name in zip(layout.contributions, layout.names, strict=True)
            ]
            parts = pack(
                layout.layout,
                list(map(jnp.asarray, contributed)),
                used,
                worker=jnp.int32(worker),
                first=jnp.float32(call == 0),
            )
            assert [(p.shape, p.dtype) for p in parts] == [(p.shape, p.dtype) for p in layout.layout.parts]
            arrived = parts if arrived is None else accumulate(layout.layout.ops, arrived, parts)
    return unpacked(layout.layout, arrived, range(len(layout.contributions)))


def unpacked(layout, parts, numbers, taking_part=None):
    there = jnp.ones(layout.capacity, bool) if taking_part is None else jnp.array(taking_part)
    return list(map(unpack(layout, parts, worker=0, taking_part=there), numbers))


@dataclass
class _Named:
    layout: _message.Layout
    names: list[str]

    @property
    def contributions(self):
        return self.layout.contributions


def named(leaves, workers, status=STATUS):
    return _Named(lay_out(contributions(leaves, workers), capacity=workers, status=status), [x.weight for x in leaves])


def expected(number, leaf, values, weights):
    """The same in numpy, in double precision."""
    rows = [
        [(np.asarray(v[number], np.float64), weights[w][c][leaf.weight]) for c, v in enumerate(calls)]
        for w, calls in enumerate(values)
    ]
    if leaf.scope < Scope.MICROBATCH:  # belongs to the worker, so it counts once
        rows = [calls[:1] for calls in rows]
    flat = [pair for calls in rows for pair in calls]
    stacked = np.stack([x for x, _ in flat])
    if leaf.kind == "gather":
        return np.stack([calls[0][0] for calls in rows])
    if leaf.kind == "broadcast":
        return rows[leaf.root % len(rows)][0][0]
    if leaf.op == "mean":
        return np.tensordot([w for _, w in flat], stacked, 1) / sum(w for _, w in flat)
    return {"sum": np.sum, "max": np.max, "min": np.min}[leaf.op](stacked, axis=0)


TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-13}


@st.composite
def leaf_of(draw, dtypes):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.sampled_from(SHAPES))
    kind = draw(st.sampled_from(["reduce", "reduce", "gather", "broadcast"]))
    if kind != "reduce":  # a value per worker: those of calls cannot be split, and are sent in a single one
        return Leaf(dtype, shape, kind, root=draw(st.integers(0, 3)), scope=Scope.WORKER)
    ops = ["sum", "max", "min"] + ["mean"] * (3 * (np.dtype(dtype).kind not in "iu"))
    scope = draw(st.sampled_from([Scope.MICROBATCH, Scope.MICROBATCH, Scope.WORKER]))
    return Leaf(dtype, shape, kind, draw(st.sampled_from(ops)), scope=scope, weight=draw(weight_names))


weight_names = st.sampled_from(["examples", "tokens"])


def check_round_trip(leaves, calls, seed):
    rng = np.random.default_rng(seed)
    layout = named(leaves, len(calls))
    values, weights = [], []
    for n in calls:
        of_worker = [draw_value(rng, leaf) for leaf in leaves]
        fresh = [
            [
                x if leaf.scope < Scope.MICROBATCH else draw_value(rng, leaf)
                for leaf, x in zip(leaves, of_worker, strict=True)
            ]
            for _ in range(n)
        ]
        values.append(fresh)
        tokens = float(np.float32(rng.uniform(0.1, 3)))  # weights are float32
        weights.append([{"examples": float(rng.integers(1, 9)), "tokens": tokens} for _ in range(n)])
        for w in weights[-1]:  # a weight beside a worker's value is the worker's too
            w["examples"] = (
                weights[-1][0]["examples"] if any(x.scope < Scope.MICROBATCH for x in leaves) else w["examples"]
            )
    arrived = send(layout, values, weights)
    for number, (leaf, got) in enumerate(zip(leaves, arrived, strict=True)):
        want = expected(number, leaf, values, weights)
        assert (got.shape, got.dtype) == (want.shape, np.dtype(leaf.dtype))
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        error = np.abs(np.asarray(got, np.float64) - want).max(initial=0) / scale
        assert error <= TOLERANCE.get(leaf.dtype, 0), leaf
    check_layout(layout.layout, leaves, len(calls))


def check_layout(layout, leaves, workers):
    """Nothing overlaps, nothing is left over, and large leaves have parts of their own."""
    used = [np.zeros(int(np.prod(p.shape)), int) for p in layout.parts]
    places = {(e.part, e.offset): e for e in [*layout.entries, *filter(None, layout.weights)]}
    for entry in places.values():
        used[entry.part][entry.offset : entry.offset + entry.size] += 1
    if layout.status:
        used[0][-layout.status :] += 1
    assert all((u == 1).all() for u in used)
    for leaf, entry in zip(leaves, layout.entries, strict=True):
        rows = workers if leaf.kind == "gather" else 1
        bytes_sent = int(np.prod(leaf.shape)) * rows * max(4, np.dtype(leaf.dtype).itemsize)
        is_float = np.dtype(leaf.dtype).kind not in "iu"
        if is_float and bytes_sent >= LARGE and leaf.op not in ("max", "min"):
            assert layout.parts[entry.part].shape == entry.shape
    assert layout.nbytes == sum(u.size * p.dtype.itemsize for u, p in zip(used, layout.parts, strict=True))
    assert layout.ops[0] == "sum"
    assert layout.parts[0].dtype.kind == "f"
    assert len(layout.parts[0].shape) == 1


calls_of_workers = st.lists(st.integers(1, 2), min_size=1, max_size=3)


@settings(max_examples=8)
@given(st.lists(leaf_of(DTYPES[:6]), min_size=1, max_size=6), calls_of_workers, st.integers(0, 99))
def test_reductions_equal_those_of_numpy(leaves, calls, seed):
    check_round_trip(leaves, calls, seed)


@settings(max_examples=5)
@given(st.lists(leaf_of(DTYPES), min_size=1, max_size=5), calls_of_workers, st.integers(0, 99))
@example([Leaf("float64", (), "reduce", "mean", scope=Scope.MICROBATCH, weight="tokens")], [1, 1], 0)
def test_reductions_equal_those_of_numpy_in_double_precision(leaves, calls, seed):
    with jax.enable_x64(True):
        check_round_trip(leaves, calls, seed)


# --- who counts how often ---------------------------------------------------------------------------------------------


def test_half_precisions_are_summed_in_single():
    layout = named([Leaf("float16", (), op="sum"), Leaf("bfloat16", (), op="sum")], 2)
    values = [[[np.float16(2048), ml_dtypes.bfloat16(256)]] + [[np.float16(1), ml_dtypes.bfloat16(1)]] * 4, [[0, 0]]]
    arrived = send(layout, values, [[{"examples": 1}] * 5, [{"examples": 1}]])
    assert [float(x) for x in arrived] == [2052.0, 260.0]  # 2048 + 1 is 2048 in float16, and 256 + 1 in bfloat16 256
    assert [p.dtype for p in layout.layout.parts] == [np.float32]


# --- layout -----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_leaves_weights_and_status():
    leaves = [Leaf("float32", (3,)), Leaf("bfloat16", (2,)), Leaf("float32", (), "gather", scope=Scope.WORKER)]
    layout = named(leaves, 4).layout
    assert layout.nbytes == 4 * (3 + 2 + 4 + 1 + STATUS)  # one weight for both means
    assert len(layout.parts) == 1


def test_every_operation_and_dtype_has_a_buffer_of_its_own():
    leaves = [Leaf("float32", ()), Leaf("int32", (), op="sum"), Leaf("int32", (3,), op="sum")]
    leaves += [Leaf("float32", (), op="max"), Leaf("bfloat16", (), op="max"), Leaf("int32", (), op="min")]
    parts = named(leaves, 2).layout.parts
    assert [(p.op, str(p.dtype), p.shape) for p in parts] == [
        ("sum", "float32", (1 + 1 + STATUS,)),
        ("max", "float32", (2,)),
        ("sum", "int32", (4,)),
        ("min", "int32", (1,)),
    ]


def test_checked_values_of_one_weight_are_adjacent():
    kinds = [Leaf("float32", ()), Leaf("float32", (), "gather", scope=Scope.WORKER), Leaf("float32", (), op="sum")]
    kinds += [Leaf("float32", (), scope=Scope.WORKER), Leaf("float32", (), weight="tokens"), Leaf("bfloat16", ())]
    layout = named(kinds * 2, 1).layout
    assert [e.offset for e in layout.entries] == [2, 8, 4, 10, 6, 0, 3, 9, 5, 11, 7, 1]  # behind 7, what may be NaN
    assert {w.offset for w in layout.weights if w} == {12, 13, 14}


def test_workers_without_examples_change_no_result_and_their_rows_are_unknown():
    leaves = [
        Leaf("float32", (), "gather", scope=Scope.WORKER),
        Leaf("float32", (3,)),
        Leaf("int32", (2,), "gather", scope=Scope.WORKER),
        *(Leaf(dtype, (), op=op) for dtype in ("float32", "int32") for op in ("max", "min")),
    ]
    layout = lay_out(contributions(leaves, 4), capacity=4, status=0)
    values = [jnp.asarray(x) for x in ([1.5, [1.0, 2.0, 3.0]])] + [
        jnp.array([7, 8]),
        *map(jnp.asarray, (-4.0, 4.0, -4, 4)),
    ]
    weights = [None if c.weight is None else jnp.float32(5) for c in layout.contributions]
    sent = pack(layout, values, weights, worker=jnp.int32(1), first=jnp.float32(1))
    arrived = accumulate(layout.ops, sent, list(map(jnp.asarray, neutral_parts(layout))))
    rows, mean, whole_numbers, *extremes = unpacked(layout, arrived, range(7), [False, True, False, False])
    np.testing.assert_array_equal(rows, [np.nan, 1.5, np.nan, np.nan])
    np.testing.assert_array_equal(whole_numbers, [[0, 0], [7, 8], [0, 0], [0, 0]])
    np.testing.assert_array_equal(mean, values[1])
    assert list(map(float, extremes)) == [-4, 4, -4, 4]


@pytest.mark.parametrize(
    ("messages", "statuses"),
    [
        ([(True, None), (True, None)], [0, STATUS]),
        ([(True, None), (True, 0)], [STATUS, 0]),
        ([(True, None), (False, None)], [STATUS, 0]),
        ([(True, 0), (False, None)], [0, 0]),
        ([], []),
    ],
)
def test_the_status_is_in_the_last_message_that_every_step_sends(messages, statuses):
    sent = [
        SimpleNamespace(contributions=contributions([Leaf("float32", (3,), op="sum")], 2), travels=travels, gate=gate)
        for travels, gate in messages
    ]
    layouts = lay_out_all(sent, capacity=2, status=STATUS)
    assert [layout.status for layout in layouts] == statuses
    assert [layout.parts[0].shape for layout in layouts] == [(3 + n,) for n in statuses]
