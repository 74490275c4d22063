"""Workers leave and join between two steps: nothing is compiled, nothing of what is computed is wrong, and a process
that joins continues from the state of the others.
"""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive import operators
from adaptive.data.iterators import from_iterator
from adaptive.runtime.local_world import LocalWorld
from tests import problems
from tests.adaptive.program.resumable import Growing, plain
from tests.problems import Compilations, descend, warm

DATA = {"x": np.random.default_rng(0).normal(size=(48, 2)).astype(np.float32)}


def build(driver, state=0.0, data=DATA, global_batch=16, **options):
    return problems.build(driver, state, data, global_batch, **{"resizable": True, **options})


# --- who counts -------------------------------------------------------------------------------------------------------


def counts(state, batch):
    own = jnp.asarray(ad.worker_index() * 0 + 1)  # local: each worker sends its own
    found = {
        "workers": ad.num_workers(),
        "sum": comm.all_reduce(1, op="sum"),
        "half": comm.all_reduce(jnp.asarray(0.5, jnp.float16), op="sum"),
        "own": comm.all_reduce(own, op="sum"),
        "rows": comm.all_gather(jnp.asarray(7.0)),
        "own_rows": comm.all_gather(own.astype(jnp.float32) * 7.0),
        "numbers": comm.all_gather(3),
        "own_numbers": comm.all_gather(own * 3),
        "least": comm.all_reduce(2, op="min"),
        "most": comm.all_reduce(own * 2, op="max"),
        "mean": comm.all_reduce(jnp.asarray(4.0)),
        "gated": comm.all_reduce(own, op="sum", when=ad.num_workers() > 2),
    }
    return state + comm.all_reduce(batch["x"].mean()), {**found, "gated": comm.all_gather(found["gated"])}


def check_counts(report, there):
    """All of a report's counts are of the workers that are there."""
    n, m = len(there), {name: np.asarray(value).astype(float).tolist() for name, value in report.metrics.items()}
    assert [slot for slot, size in enumerate(report.batch_sizes) if size] == list(there)
    assert [m[name] for name in ("workers", "sum", "own", "half", "least", "most", "mean")] == [n, n, n, n / 2, 2, 2, 4]
    rows = [7.0 if slot in there else np.nan for slot in range(4)]
    np.testing.assert_array_equal(m["rows"], rows)
    np.testing.assert_array_equal(m["own_rows"], rows)
    assert m["numbers"] == m["own_numbers"] == [3.0 * (slot in there) for slot in range(4)]
    assert [m["gated"][slot] for slot in there] == [n if n > 2 else 1] * n


def test_workers_count_while_they_take_examples_and_nothing_is_compiled():
    world = LocalWorld(4)
    with build(counts, world=world) as program:
        program.warm_up()
        check_counts(program.step(), range(4))
        with Compilations() as compilations:
            for number, (change, there) in enumerate(
                (
                    (lambda: world.leave(3), (0, 1, 2)),
                    (lambda: world.leave(0), (1, 2)),
                    (lambda: world.join(3), (1, 2, 3)),
                    (lambda: program.rescale(workers=4), range(4)),
                    (lambda: program.rescale(workers=1), (0,)),
                    (lambda: program.rescale(workers=4), range(4)),
                    (lambda: program.rescale(shares=(0, 0, 3, 0)), (2,)),
                    (lambda: program.rescale(shares=(1, 0, 2, 1)), (0, 2, 3)),
                )
            ):
                change()
                report = program.step()
                check_counts(report, there)
                assert report.global_batch == 16
                assert number > 5 or compilations == []


def test_outside_a_program_workers_counts_members():
    with comm.DeviceWorld(jax.local_devices()[:4]) as world:
        world.leave(1)
        assert (int(ad.num_workers()), ad.capacity()) == (3, 4)
        assert float(comm.all_reduce(1.0, op="sum")) == 3
        np.testing.assert_array_equal(comm.all_gather(2.0), [2, np.nan, 2, 2])


# --- what follows them ------------------------------------------------------------------------------------------------


def test_the_program_lists_members_and_keeps_the_global_batch_if_possible():
    world = LocalWorld(3)
    with build(descend, global_batch=20, world=world, max_local_batch=8) as program:
        warm(program)
        assert program.step().members == (0, 1, 2)
        world.leave(1)
        report = program.step()
        assert (report.members, report.batch_sizes) == ((0, 2), (8, 0, 8))
        assert report.notes[0] == "worker slot 1 is empty: its worker has left."
        assert report.notes[1] == "global batch 20 clipped to 16, the maximum of these workers."
        assert program.step().notes == ()
        assert "no examples for worker 1" in program.explain()
        world.join(1)
        report = program.step()
        assert (report.members, report.joined, report.global_batch) == ((0, 1, 2), (1,), 20)
        assert report.notes == ("a worker has joined in worker slot 1.",)
        world.leave(1)
        world.join(1)  # another one, between the same two steps
        report = program.step()
        assert (report.members, report.joined) == ((0, 1, 2), (1,))
        assert program.step().joined == ()


@pytest.mark.parametrize("waits_for", ["in_reserve", "needs_state_transfer"])
def test_a_process_without_the_others_state_is_not_settled(waits_for, monkeypatch):
    world = LocalWorld(2)
    with build(descend, world=world) as program:
        members = program._loop.members
        assert members.settled
        monkeypatch.setattr(world, waits_for, True)
        assert not members.settled
        monkeypatch.undo()
        world.leave(1)
        assert not members.settled


def test_a_program_begins_in_a_world_with_an_empty_worker_slot():
    world = LocalWorld(4, workers=3)
    with build(descend, global_batch=3, world=world) as program:
        assert program.batch_sizes == (1, 1, 1, 0)
        assert program.step().members == (0, 1, 2)
    with pytest.raises(ad.BatchSizeError, match="only to worker slot 3, which is empty"):
        build(descend, global_batch=3, world=world, shares=[0, 0, 0, 1])


def test_the_state_and_operator_states_are_those_of_the_members():
    """The first worker slot is empty: whatever took the first worker's state would be off."""

    def driver(state, batch):
        state, metrics = descend(state, batch)
        return state, {**metrics, "ema": mon.ema(metrics["loss"], decay=0.5)}

    world = LocalWorld(4)
    with build(driver, world=world) as program, build(driver, world=LocalWorld()) as alone:
        for change in (None, lambda: world.leave(0), None, lambda: world.join(0), lambda: world.leave(1)):
            if change:
                change()
            found, expected = program.step().metrics["ema"], alone.step().metrics["ema"]
            assert float(found) == pytest.approx(float(expected), rel=1e-5)
            assert float(program.state) == pytest.approx(float(alone.state), rel=1e-5)
            if program.members == (1, 2, 3):
                seen = float(program.evaluate(lambda s, b: s + 0 * b["x"].mean(), DATA, batch=5))
                assert seen == pytest.approx(float(program.state), rel=1e-6)
                assert program.check()
                assert float(program.checkpoint()["state"]) == float(program.state)
        states = program._parts.engine.states
        assert len({np.asarray(states[slot][0]).tobytes() for slot in program.members}) == 1


def test_local_state_is_initial_for_a_joining_worker_and_unchanged_without_examples():
    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        own = state["own"] * 0.5 + batch["x"].mean() / ad.batch_size().astype(jnp.float32)  # nothing over nothing
        return {"all": state["all"] + mean, "own": own}, {}

    def own():
        return np.array([float(leaves[1]) for leaves in program._parts.engine.states])

    state, world = {"all": jnp.zeros(()), "own": jnp.float32(7)}, LocalWorld(4)
    options = {"per_worker_state": lambda state: state["own"], "deterministic": True}
    with build(driver, state, world=world, **options) as program:
        program.step()
        first = own()
        program.rescale(shares=[1, 0, 1, 1])
        program.step()
        assert (own() != first).tolist() == [True, False, True, True]
        world.leave(2)
        world.leave(3)
        program.step()
        world.join(3)
        program.rescale(shares=[1, 0, 0, 1])
        program._loop.members.apply()
        assert own()[3] == 7
        notes = program.step().notes
        assert "worker 3 joined, with the initial value of the state that is kept per worker." in notes
        assert own()[1] == first[1]
        assert np.isfinite(own()).all()


def test_policies_forget_the_worker_that_has_left():
    shown, known, world = [], [], LocalWorld(4)

    def update(observation, state):
        steps = state + (np.asarray(observation.batch_sizes) > 0)
        shown.append((observation.members, observation.joined, steps.tolist()))
        known.append(bool(np.isfinite(observation.values[0][1])))
        return None, steps

    policy = ctrl.Policy(lambda n: np.zeros(n), update, "counts")

    def driver(state, batch):
        ctrl.hook(policy, comm.all_gather(mon.compute_seconds()), every=3)
        return descend(state, batch)

    with build(driver, world=world) as program:
        program.warm_up()  # seconds beside a compiler are unknown
        for step in range(1, 7):
            if step in (3, 5):
                (world.leave if step == 3 else world.join)(1)
            program.step()
    assert [joined for _, joined, _ in shown] == [(), (), (), (), (1,), ()]
    assert [members for members, *_ in shown[2:4]] == [(0, 2, 3)] * 2
    assert [shown[number][2] for number in (3, 4, 5)] == [[4, 2, 4, 4], [5, 1, 5, 5], [6, 2, 6, 6]]
    assert known == [False, True, False, False, False, True]


def test_an_absent_clients_data_is_not_used():
    shards, world = ad.Shards([{"x": np.full((12, 2), n + 1, np.float32)} for n in range(4)]), LocalWorld(4)

    def driver(state, batch):
        return state, {"least": comm.all_reduce(batch["x"].min(), op="min")}

    with build(driver, data=shards, global_batch=12, world=world) as program:
        for change, least, cursor in ((None, 1, 3), (world.leave, 2, 3), (None, 2, 3), (world.join, 1, 6)):
            if change:
                change(0)
            assert float(program.step().metrics["least"]) == least
            assert program._parts.stream.cursors[0] == cursor


def test_the_broadcasting_worker_must_be_a_member():
    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean()), {"first": comm.broadcast(batch["x"].mean(), root=2)}

    world, needed = LocalWorld(4), "worker 2 must take at least one example"
    with pytest.raises(ad.BatchSizeError, match=needed):
        build(driver, world=world, shares=[1, 1, 0, 1])
    with build(driver, world=world) as program:
        program.step()
        with pytest.raises(ad.BatchSizeError, match=needed):
            program.rescale(shares=[1, 1, 0, 1])
        with pytest.raises(ad.WorkerCountError, match="3 to 4 are"):
            program.rescale(workers=2)
        world.leave(2)
        with pytest.raises(ad.BatchSizeError, match=needed):
            program.step()


def test_a_noise_scale_needs_two_groups_which_a_lone_worker_makes_of_its_batch():
    def driver(w, batch):
        own = jax.grad(lambda w: jnp.square(batch["x"] @ w).mean())(w)
        avg = comm.all_reduce(own)
        return w - 0.1 * avg, mon.noise_scale(own, avg)

    options = {"shares": [0, 0, 1, 0], "deterministic": True, "world": LocalWorld(4)}
    with build(driver, jnp.ones(2), **options) as program:
        for shares, calls in (([0, 0, 1, 0], [(), (), (8, 8), ()]), ([1, 0, 1, 0], [(8,), (), (8,), ()])):
            program.rescale(shares=shares)
            report = program.step()
            assert list(map(tuple, report.microbatches)) == calls
            noise = report.metrics
            assert np.isfinite([float(x) for x in (noise.scale, noise.trace, noise.signal)]).all()


# --- a process that joins ---------------------------------------------------------------------------------------------

START = {"w": np.zeros(2, np.float32), "n": 0, "key": jax.random.key(3), "own": np.float32(0)}


def resumable(data, **options):
    def driver(state, batch):
        key, _ = jax.random.split(state["key"])
        loss = comm.all_reduce(batch["x"].mean())
        operators.hook("grow", Growing(), (loss,), every=3)
        rate, own = ad.hyperparameter("rate", 0.5), state["own"] + comm.local_mean(jnp.float32(1))
        new = {"w": state["w"] + rate * loss, "n": state["n"] + 1, "key": key, "own": own}
        return new, {"loss": loss, "rate": rate}

    options = {"world": LocalWorld(2), "deterministic": True, "per_worker_state": lambda state: state["own"], **options}
    return build(driver, START, data, **{"global_batch": 5, **options})


def rows(epoch):
    yield from ({"x": np.float32(i + 100 * epoch)} for i in range(24))


SIZES_OF_ONE = {"revision", "_readiness", "_last_bounds"}  # of one process; the rest is replicated
KINDS = {"arrays": lambda: {"x": np.arange(24, dtype=np.float32)}, "an iterator": lambda: from_iterator(rows)}


def course(program, steps):
    return [
        (r.step, r.epoch, r.examples, r.batch_sizes, float(r.metrics["loss"]), float(r.metrics["rate"]))
        for r in program.run(steps=steps)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_joins_continues_as_the_others_do(kind):
    with resumable(KINDS[kind]()) as program, resumable(KINDS[kind](), global_batch=7, shares=(5, 2)) as other:
        for each in (program, other):
            each.warm_up()
        program.set_hyperparameters(rate=0.25)
        course(program, 7)
        course(other, 2)
        there, here = program._parts, other._parts
        there.skipped.in_a_row = 2
        there.hooks.catch_up(there.sizes)
        usual = dict(vars(there.sizes))
        vars(there.sizes).update(
            {"pending": (4, 1), "target": (1, 4), "wanted": 9, "_all_ready": True, "_all_able": True}
        )
        there.membership.asked, there.membership._ready_elsewhere = 2, 1
        there.hooks.joined[0].add(1)
        program._loop.members._notes.append("a note")
        small, arrays = pickle.loads(pickle.dumps(program._loop.members.pack()))
        buffers = here.engine.workers.receive_buffers()
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer[...] = array
        other._loop.members.unpack((small, buffers))
        for part, local in (("sizes", SIZES_OF_ONE), ("membership", {"_world", "_termination", "_revision"})):
            ours, theirs = (vars(getattr(parts, part)) for parts in (here, there))
            assert {k: repr(v) for k, v in ours.items() if k not in local} == {
                k: repr(v) for k, v in theirs.items() if k not in local
            }
        for parts in (here, there):
            vars(parts.sizes).update({k: v for k, v in usual.items() if k not in SIZES_OF_ONE})
        for get in (lambda p: p.hooks.joined, lambda p: p.run.limit, lambda p: p.run.run_id, lambda p: p.digest.asked):
            assert get(here) == get(there)
        assert "a note" in other._loop.members.drain_events()[2]
        assert here.skipped.in_a_row == 2
        assert other.batch_sizes == program.batch_sizes
        assert dict(here.hyperparameters.values) == {"rate": 0.25}
        assert here.digest.value == there.digest.value
        assert float(other.state["own"]) == 0, "a new worker's own state is the initial one"
        assert course(other, 9) == course(program, 9)
        ours, theirs = plain(other.state), plain(program.state)
        for name in ("w", "n", "key"):
            np.testing.assert_array_equal(ours[name], theirs[name])
