"""`all_reduce` in codes of a few bits: error feedback, weights, gates, and values that are not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld
from collectives.compression._coded import CodedSlices
from collectives.compression._wire import codec_of

SIZES = (4, 6, 2)
FEEDBACK = "error_feedback"
N = 40  # numbers of the tree below


def data(seed=0):
    return {"x": np.random.default_rng(seed).normal(size=(120, N))}


def driver_of(**options):
    """A sum over steps of a reduced mean, of two leaves."""

    def driver(total, batch):
        own = batch["x"].mean(0)
        found = comm.all_reduce({"a": own[:30].reshape(5, 6), "b": own[30:]}, **options)
        return total + jnp.concatenate([found["a"].reshape(-1), found["b"]]), {}

    return driver


def built(driver, world=None, **options):
    given = {"global_batch": sum(SIZES), "shares": SIZES, "resizable": False} | options
    return ad.Program(driver, jnp.zeros(N), data(), world=world or LocalWorld(len(SIZES)), **given)


def left(program):
    """What each worker could not send, by its number."""
    (numbers,) = [i for i, x in enumerate(program._parts.engine.op_states[0]) if x[0].shape == (N,)]
    return [np.asarray(states[numbers][0]) for states in program._parts.engine.op_states]


def means_of(program):
    """Each worker's own mean in each step; None without examples."""
    seen, take = [], program._parts.stream.take

    def taken(*args, **options):
        share = take(*args, **options)
        seen.append([None if b is None else np.asarray(b["x"]).mean(0) for b in share.batches])
        return share

    program._parts.stream.take = taken
    return seen


def rounded(codec, x, key=None):
    """A vector as its codes have it, and its codes."""
    coded = codec.encode(codec.blocks(jnp.asarray(x)), key)
    return np.asarray(codec.decode(coded, jnp.float64)).reshape(-1)[: len(x)], coded


def second_key(step):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(1), step), 0)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("wire", ["2bit", pytest.param("8bit", marks=pytest.mark.long)])
def test_the_update_is_that_of_a_plain_loop_given_the_codes(wire):
    """v = x + e; c = Q(v); e = v - c; the mean by examples of all c, which is coded again.

    Slices are summed in single precision, so their second factors are exact to its last digit.
    """
    program = built(driver_of(wire=wire, rounding=FEEDBACK))
    codec, weights, seen = codec_of(wire).fitted(N), np.float32(SIZES), means_of(program)
    errors, total = np.zeros((3, N)), np.zeros(N)
    for step in range(1, 6):
        program.step()
        wanted = np.stack(seen[-1]) + errors
        sent, codes = zip(*[rounded(codec, v) for v in wanted], strict=True)
        errors = wanted - np.stack(sent)
        rows = [codec.of_rows(codec.to_rows(c, w)) for c, w in zip(codes, weights, strict=True)]
        one, two, three = (np.asarray(codec.decode(row, jnp.float32)) for row in rows)
        of_all = codec.decode(codec.encode(jnp.asarray((one + two) + three), second_key(step)))
        total += np.asarray(of_all, np.float64).reshape(-1)[:N] / 12
        np.testing.assert_allclose(program.state, total, rtol=0, atol=step * 3e-7)
        np.testing.assert_allclose(left(program), errors, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("double_precision")
def test_with_hosts_one_worker_of_each_sends_the_exact_mean_of_its_host():
    """Its feedback is the host's; where it leaves, the next worker of the host sends, without any."""
    world, hosts = LocalWorld(3), [[0, 2], [1]]
    options = {"wire": "4bit", "rounding": FEEDBACK, "hosts": hosts}
    program = built(driver_of(**options), world, resizable=True, shares=None, microbatch=2)
    codec, seen = codec_of("4bit").fitted(N), means_of(program)
    errors, total = np.zeros((3, N)), np.zeros(N)
    for step in range(1, 6):
        if step == 3:
            world.leave(0)
        report = program.step()
        sizes, rows = np.array(report.batch_sizes), {}
        for host in hosts:
            (first, *_), there = [i for i in host if sizes[i]], [i for i in host if sizes[i]]
            mean = np.average([seen[-1][i] for i in there], axis=0, weights=sizes[there])
            sent, codes = rounded(codec, mean + errors[first])
            errors[first] += mean - sent
            rows[first] = codec.of_rows(codec.to_rows(codes, np.float32(sizes[there].sum())))
        of_all = sum(codec.decode(rows[i], jnp.float32) for i in sorted(rows))
        of_all = codec.decode(codec.encode(of_all, second_key(step)))
        total += np.asarray(of_all, np.float64).reshape(-1)[:N] / sizes.sum()
        np.testing.assert_allclose(program.state, total, rtol=0, atol=1e-5)
        assert np.count_nonzero(sizes) == (3 if step < 3 else 2)
        there = sizes > 0
        np.testing.assert_allclose(np.array(left(program))[there], errors[there], atol=1e-12)


def test_a_slice_of_one_worker_is_not_coded_again_and_a_slice_may_be_empty():
    codec = codec_of("2bit").fitted(N)
    slices = CodedSlices(codec, stochastic=True)
    row = codec.to_rows(codec.encode(codec.blocks(jnp.arange(N, dtype=np.float32)))).reshape(-1)
    np.testing.assert_array_equal(slices.reduced(row[None], None, 1, 0), row)
    assert slices.reduced(jnp.zeros((3, 0), np.uint8), None, 1, 0).size == 0


def test_hosts_send_sums_and_keep_the_residual_in_steps_without_messages():
    def driver(total, batch):
        own = jnp.arange(N, dtype=np.float32) * (1 + ad.worker_index()).astype(np.float32) + 0 * batch["x"].sum()
        even = ad.step_number() % 2 == 0
        found = comm.all_reduce(own, op="sum", wire="8bit", rounding=FEEDBACK, hosts=[[0, 1], [2]], when=even)
        return ad.replicated(jnp.where(even, found, total)), {}

    program = built(driver)
    program.step()
    kept = left(program)
    np.testing.assert_allclose(program.state, 6 * np.arange(N), atol=1.2 * 6 * N / 127)
    assert np.abs(kept[0]).max() > 0.01
    assert not kept[1].any()
    program.step()
    np.testing.assert_array_equal(left(program), kept)


def test_sums_and_weights_and_replicated_values():
    def driver(total, batch):
        same = jnp.arange(N, dtype=np.float32) - 3
        own = jnp.arange(N, dtype=np.float32) * (1 + ad.worker_index()).astype(np.float32) + 0 * batch["x"].sum()
        metrics = {
            "sum": comm.all_reduce(own, op="sum", wire="8bit"),
            "weighted": comm.all_reduce(own, weight=1 + ad.worker_index(), wire="8bit"),
            "same": comm.all_reduce(same, wire="8bit"),
            "same, added": comm.all_reduce(same, op="sum", wire="8bit"),
        }
        return total, metrics

    metrics = built(driver).step().metrics
    expected = {"sum": 6 * np.arange(N), "weighted": 14 / 6 * np.arange(N)}
    expected |= {"same": np.arange(N) - 3.0, "same, added": 3 * (np.arange(N) - 3.0)}
    for name, wanted in expected.items():
        np.testing.assert_allclose(metrics[name], wanted, atol=1.2 * np.abs(wanted).max() / 127)


def test_a_worker_without_examples_keeps_its_residual():
    program = built(driver_of(wire="2bit", rounding=FEEDBACK), resizable=True, microbatch=2)
    program.step()
    kept = left(program)
    program.rescale(shares=[1, 0, 1])
    while program.step().batch_sizes[1]:
        kept = left(program)
    np.testing.assert_array_equal(left(program)[1], kept[1])
    assert (left(program)[0] != kept[0]).any()


def test_a_checkpoint_has_the_residual():
    """A restored program continues bitwise; another number of workers is refused, by name."""
    program = built(driver_of(wire="2bit", rounding=FEEDBACK))
    for _ in range(3):
        program.step()
    kept, checkpoint = left(program), program.checkpoint()
    other = built(driver_of(wire="2bit", rounding=FEEDBACK))
    other.step()
    other.restore(checkpoint)
    np.testing.assert_array_equal(left(other), kept)
    program.step(), other.step()
    np.testing.assert_array_equal(other.state, program.state)
    np.testing.assert_array_equal(left(other), left(program))
    fewer = built(driver_of(wire="2bit", rounding=FEEDBACK), LocalWorld(2), shares=None)
    with pytest.raises(ad.CheckpointError, match="local state of 3 workers; this world has 2"):
        fewer.restore(checkpoint)


@pytest.mark.usefixtures("double_precision")
def test_a_lost_workers_residual_is_lost_and_a_joining_one_has_none():
    world = LocalWorld(3)
    options = {"resizable": True, "shares": None, "microbatch": 2}
    program = built(driver_of(wire="2bit", rounding=FEEDBACK), world, **options)
    seen, codec = means_of(program), codec_of("2bit").fitted(N)
    errors = np.zeros((3, N))
    for step in range(1, 7):
        if step == 3:
            world.leave(1)
        if step == 5:
            world.join(1)
            errors[1] = 0
        report = program.step()
        for worker in np.flatnonzero(report.batch_sizes):
            wanted = seen[-1][worker] + errors[worker]
            errors[worker] = wanted - rounded(codec, wanted)[0]
        assert (report.batch_sizes[1] > 0) == (step < 3 or step >= 5)
        there = np.array(report.batch_sizes) > 0
        np.testing.assert_allclose(np.array(left(program))[there], errors[there], atol=1e-12)


def test_values_that_are_not_finite_are_named_and_leave_no_residual():
    def driver(total, batch):
        own = jnp.where((ad.step_number() == 1) & (ad.worker_index() == 1), jnp.nan, batch["x"].mean(0))
        return total + comm.all_reduce({"leaf": own}, wire="4bit", rounding=FEEDBACK)["leaf"], {}

    program = built(driver)
    program.step()
    with pytest.raises(ad.NonFiniteError, match=r"worker 1(?s:.*)\['leaf'\]"):
        program.step()
    program = built(driver, nonfinite="skip")
    for _ in range(4):
        program.step()
    assert np.isfinite(program.state).all()
    assert np.isfinite(left(program)).all()


def test_dropped_contributions_are_in_no_code():
    def driver(total, batch):
        own = jnp.where(ad.worker_index() == 1, jnp.nan, batch["x"].mean(0))
        return total + comm.all_reduce(own, wire="8bit", nonfinite="drop"), {}

    program = built(driver)
    seen = means_of(program)
    program.step()
    exact = np.average([seen[-1][0], seen[-1][2]], axis=0, weights=[4, 2])
    np.testing.assert_allclose(program.state, exact, atol=0.02)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"wire": "4bit", "hosts": [[0], [1]]},
            r"hosts=\[\[0\], \[1\]\] must be lists of workers, which hold each of the 3 workers",
        ),
        ({"wire": jnp.bfloat16, "hosts": [[0, 1], [2]]}, "hosts= is for compressed formats"),
    ],
)
def test_meaningless_arguments_are_refused(options, text):
    with pytest.raises(CollectiveError, match=text):
        built(driver_of(**options))


def test_a_rounding_without_a_format_is_refused_before_it_is_traced():
    with pytest.raises(CollectiveError, match="needs a format to round to"):
        sync.diloco(optax.sgd(0.1), optax.sgd(1.0), 2, rounding="stochastic")
