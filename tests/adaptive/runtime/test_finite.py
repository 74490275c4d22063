"""One look at what a message brought sees all that is not finite in it, and no more than that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from adaptive.base.errors import NonFiniteError
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Contribution
from adaptive.runtime import finite
from adaptive.runtime.finite import Culprit, FiniteCheck, Reduced, describe_trouble, not_finite
from adaptive.runtime.message import accumulate, lay_out, pack
from collectives._all_gather import Gather
from collectives._broadcast import Broadcast
from collectives._reduce import Reduce

from .test_message import unpacked

LARGEST = float(np.finfo(np.float32).max)


def variable(shape, dtype):
    return Var(jax.core.ShapedArray(shape, np.dtype(dtype)))


EXAMPLES, NUMBER = (variable((), np.float32) for _ in range(2))


def contribution(dtype="float32", shape=(2,), op="mean", how=None, scope=Scope.MICROBATCH, weight=EXAMPLES, name="x"):
    how = how or Reduce(op)
    result = variable(how.result_shape(shape, 2), dtype)
    weight = weight if how.weighted else None
    return Contribution(name, how, variable(shape, dtype), weight, result, scope, "driver.py:7")


def arrive(contributions, values, weights=1.0, workers=2):
    """The layout, each worker's parts, and what arrives, where both workers send `values[worker]`."""
    layout = lay_out(contributions, capacity=workers, status=3)
    weights = np.broadcast_to(weights, (workers, len(contributions)))
    sent = []
    for worker, (row, ws) in enumerate(zip(values, weights, strict=True)):
        cast = [jnp.asarray(v, c.value.aval.dtype) for c, v in zip(contributions, row, strict=True)]
        full = [jnp.broadcast_to(v, c.value.aval.shape) for c, v in zip(contributions, cast, strict=True)]
        given = [None if c.weight is None else jnp.float32(w) for c, w in zip(contributions, ws, strict=True)]
        sent.append(pack(layout, full, given, worker=jnp.int32(worker), first=jnp.float32(1)))
    reduced = sent[0]
    for parts in sent[1:]:
        reduced = accumulate(layout.ops, reduced, parts)
    return layout, sent, reduced


def passes(contributions, values, weights=1.0):
    """Return the finding, the same on CPUs, on other devices and in small blocks; compared with the message."""
    layout, _, reduced = arrive(contributions, values, weights)
    found = {FiniteCheck(layout, platform).passes(reduced) for platform in ("cpu", "gpu")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finite, "_BLOCK", 1)
        found.add(FiniteCheck(layout, "cpu").passes(reduced))
    assert len(found) == 1
    if bool(jax.jit(FiniteCheck(layout, "cpu").all_finite)(reduced)):  # may be False for what is nearly infinite
        assert found == {True}
    wanted = [i for i, c in enumerate(contributions) if c.how.reduces and c.scope == Scope.MICROBATCH]
    result = unpacked(layout, reduced, wanted)
    if all(w == 1.0 for w in np.ravel(weights)):
        assert found == {all(bool(jnp.isfinite(x).all()) for x in result)}
    return found.pop()


@pytest.mark.parametrize(("dtype", "weight"), [("float32", 7.0), ("float16", 1e-3), ("complex64", 1e-3)])
def test_a_program_over_all_devices_reports_finite_values(dtype, weight):
    layout, _, reduced = arrive([contribution(dtype), contribution(op="max")], [[0.5, 1.0], [60000.0, 3.0]], weight)
    assert bool(jax.jit(FiniteCheck(layout, "cpu").all_finite)(reduced))


@pytest.mark.parametrize(
    ("worker", "op", "bad"),
    [
        (0, "mean", np.nan),
        (1, "max", np.nan),
        (0, "min", np.nan),
        (0, "sum", np.inf),
        (0, "max", np.inf),
        (1, "min", np.inf),
    ],
)
def test_nans_of_any_worker_are_seen(op, bad, worker):
    values = [[1.0, 2.0], [3.0, 4.0]]
    values[worker][0] = np.array([1.0, bad])
    beaten = (op, bad) == ("min", np.inf)  # the other worker's number is the extreme
    assert passes([contribution(op=op), contribution()], values) == beaten


@pytest.mark.parametrize("part", [np.nan, 1j * np.nan, np.inf * 1j])
def test_parts_of_complex_numbers_are_seen(part):
    complex_sum = contribution("complex64", op="sum")
    assert passes([complex_sum], [[1 + 1j], [2.0]])
    assert not passes([complex_sum], [[1 + 1j], [part]])


def test_an_overflowing_sum_of_finite_values_is_seen():
    for op in ("sum", "mean"):
        assert passes([contribution(op=op)], [[0.5 * LARGEST], [0.4 * LARGEST]])
        assert not passes([contribution(op=op)], [[0.6 * LARGEST], [0.5 * LARGEST]])
        assert not passes([contribution(op=op)], [[-0.6 * LARGEST], [-0.5 * LARGEST]])


@pytest.mark.parametrize(("half", "sums"), [("float16", [65500.0, 65519.0, 65520.0]), ("bfloat16", [3.38e38, 3.4e38])])
def test_a_half_that_overflows_where_it_is_half_again_is_seen(half, sums):
    """Halves travel in single precision; the sum there is finite."""
    for total in sums:
        leaf = contribution(half, op="sum")
        layout = lay_out([leaf], capacity=1, status=3)
        parts = [jnp.array([total, total, 0, 0, 0], np.float32)]
        finite = bool(jnp.isfinite(unpacked(layout, parts, [0])[0]).all())
        assert [FiniteCheck(layout, p).passes(parts) for p in ("cpu", "gpu")] == [finite] * 2, total


def test_single_precision_in_a_message_of_doubles_overflows_where_it_is_single_again():
    with jax.enable_x64(True):
        single, double = contribution(op="sum"), contribution("float64", op="sum")
        assert passes([single, double], [[0.4 * LARGEST, 1e300], [0.4 * LARGEST, 1e300]])
        assert not passes([single, double], [[0.6 * LARGEST, 1e300], [0.6 * LARGEST, 1e300]])
        assert not passes([single, double], [[1.0, 1e308], [1.0, 1e308]])


def test_a_division_that_overflows_is_seen():
    assert passes([contribution()], [[1e30], [1e30]], 1e-30)
    layout = lay_out([contribution()], capacity=1, status=3)
    parts = [jnp.array([1e15, 1, 1e-30, 0, 0, 0], np.float32)]  # numerators, their weight, the status
    assert [FiniteCheck(layout, p).passes(parts) for p in ("cpu", "gpu")] == [False, False]


@pytest.mark.parametrize("weights", [0.0, [[1.0], [-1.0]], [[np.nan], [1.0]], [[np.inf], [1.0]], 1e-40, -1.0])
def test_weights_that_cannot_be_divided_by_are_seen(weights):
    assert not passes([contribution()], [[0.0], [0.0]], weights)


def test_a_single_worker_of_zero_weight_is_no_error():
    assert passes([contribution()], [[1.0], [2.0]], [[0.0], [3.0]])


def test_values_that_may_be_nan_are_not_checked():
    free = [
        contribution(how=Gather()),
        contribution(how=Broadcast()),
        contribution(op="sum", scope=Scope.WORKER),
        contribution("int32", op="sum"),
    ]
    free += [contribution(scope=Scope.WORKER, weight=NUMBER)]
    values = [[np.nan, np.nan, np.inf, 2**31 - 1, np.nan]] * 2
    assert passes(free, values)
    unknown = np.array([[1, 1, 1, 1, np.nan]] * 2)
    assert passes(free, values, unknown)
    unknown[:, 4] = 0.0  # a mean of nothing is one of whatever value
    assert not passes(free, values, unknown)
    assert not passes([*free, contribution()], [[*row, np.nan] for row in values])


# --- whose they are ---------------------------------------------------------------------------------------------------


def test_a_worker_knows_which_of_its_own_are_not_finite():
    layout, sent, reduced = arrive([contribution(), contribution(op="max")], [[1.0, np.nan], [2.0, 1.0]])
    check = FiniteCheck(layout, "cpu")
    assert [check.of_worker(parts) for parts in sent] == [[1], []]
    assert check.of_all(reduced) == Reduced([], [1])


def trouble(weightless=(), too_large=(), culprits=(), names=("['a']", "['b']", "")):
    message = tuple(contribution("float16", name=n) for n in names)
    return describe_trouble(message, Reduced(list(weightless), list(too_large)), culprits)


def test_workers_with_the_same_error_are_named_together():
    found = trouble(culprits=[Culprit(0, (0,)), Culprit(1, (0, 1)), Culprit(3, (0,), "batch['x'] holds NaNs")])
    assert found.causes == [
        "the contributions of workers 0, 3 to all_reduce (driver.py:7) of ['a'] hold infinities or NaNs",
        "the contributions of worker 1 to all_reduce (driver.py:7) of ['a'], ['b'] hold infinities or NaNs",
    ]
    assert found.origins == ["On worker 3 batch['x'] holds NaNs."]


def test_a_sum_is_to_blame_only_where_no_worker_is():
    assert trouble(too_large=[0]).causes == [
        "the sum of all workers' contributions to all_reduce (driver.py:7) of ['a'] is too large for float16 (65504 "
        "at most), though each is finite"
    ]
    assert "too large" not in str(trouble(too_large=[0], culprits=[Culprit(0, (0,))]).causes)


def test_a_mean_without_weights_is_reported_first():
    causes = trouble([(0, 0.0), (1, 0.0)], culprits=[Culprit(0, (0,))]).causes
    assert causes[0] == (
        "all_reduce (driver.py:7) of ['a'], ['b'] is a mean over no examples: the weights of all workers are zero"
    )
    assert len(causes) == 2
    assert "sum to -2, which cannot be divided by" in trouble([(2, -2.0)]).causes[0]


def test_many_leaves_are_counted():
    names = [f"[{i}]" for i in range(9)]
    assert "of [0], [1], [2] and 6 more hold" in trouble(culprits=[Culprit(0, tuple(range(9)))], names=names).causes[0]


def test_errors_describe_the_state_and_the_remedy_for_loss_scales():
    found = trouble(culprits=[Culprit(0, (0,))])
    once, often = not_finite(found, 7), not_finite(found, 30, 25)
    for error in (once, often):
        assert isinstance(error, NonFiniteError)
        assert found.causes[0] in str(error)
        assert 'nonfinite="allow"' in str(error)
        assert "grads = comm.all_reduce(grads)" in str(error)
    assert "The state is that of step 6." in str(once)
    assert 'To skip such steps and continue: ad.Program(..., nonfinite="skip")' in str(once)
    assert "25 steps in a row were skipped before" in str(often)
    assert "The state is that of step 4" in str(often)
