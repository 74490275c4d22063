"""Worker slots are emptied and filled between two steps: nothing is compiled, and nothing of what is computed is
wrong."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.runtime.local_world import LocalWorld

from . import problems
from .problems import adam_state, descend, make_data, mean_loss

build = functools.partial(problems.build, resizable=True)  # for those who come


@pytest.fixture(params=["local", pytest.param("devices", marks=pytest.mark.long)])
def worker_slots(request):
    """A world of four worker slots."""
    return LocalWorld(4) if request.param == "local" else comm.DeviceWorld()


def data_of(examples: int = 48) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(examples, 2)).astype(np.float32)}


def alone_with(driver) -> ad.Program:
    return build(driver, jnp.zeros(()), data_of(), 16, world=LocalWorld())


class Compilations(list):
    """Record traces and compilations inside the block."""

    def __enter__(self):
        self._listen = lambda event, *_, **__: self.append(event) if "compile" in event or "trace" in event else None
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


def test_the_program_lists_members_and_keeps_the_global_batch_if_possible():
    world = LocalWorld(3)
    with build(descend, jnp.zeros(()), data_of(), 20, world=world, max_local_batch=8) as program:
        problems.warm(program)
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
        assert program.step().joined == ()


def test_the_state_is_that_of_the_members(worker_slots):
    """The first worker slot is empty: whatever took the first worker's state would be off."""
    data = data_of()
    with build(descend, jnp.zeros(()), data, 16, world=worker_slots) as program:
        program.step()
        before = program.state
        worker_slots.leave(0)
        report = program.step()
        assert float(program.state) != float(before)
        seen = float(program.evaluate(lambda s, b: s + 0 * b["x"].mean(), data, batch=5))
        assert seen == pytest.approx(float(program.state), rel=1e-6)
        assert program.check()
        kept = program.checkpoint()
        assert float(kept["state"]) == float(program.state)
        assert float(report.metrics["loss"]) > 0
        worker_slots.join(0)
        program.step()
        states = program._parts.engine.states
        assert len({np.asarray(leaves[0]).tobytes() for leaves in states}) == 1


def test_local_state_is_initial_for_a_joining_worker_and_unchanged_without_examples(worker_slots):
    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        own = state["own"] * 0.5 + batch["x"].mean() / ad.batch_size().astype(jnp.float32)  # nothing over nothing
        return {"all": state["all"] + mean, "own": own}, {}

    def own():
        return np.array([float(leaves[1]) for leaves in program._parts.engine.states])

    state = {"all": jnp.zeros(()), "own": jnp.float32(7)}
    options = {"per_worker_state": lambda state: state["own"], "deterministic": True}
    with build(driver, state, data_of(), 16, world=worker_slots, **options) as program:
        program.step()
        first = own()
        program.rescale(shares=[1, 0, 1, 1])
        program.step()
        second = own()
        assert second[1] == first[1]
        assert (second != first).tolist() == [True, False, True, True]
        worker_slots.leave(2)
        worker_slots.leave(3)
        program.step()
        worker_slots.join(3)
        program.rescale(shares=[1, 0, 0, 1])
        program._loop.membership_changes.apply()
        assert own()[3] == 7
        notes = program.step().notes
        assert "worker 3 joined, with the initial value of the state that is kept per worker." in notes
        assert own()[1] == first[1]
        assert np.isfinite(own()).all()


def test_a_worker_that_replaces_another_one_between_two_steps_has_joined(worker_slots):
    with build(descend, jnp.zeros(()), data_of(), 16, world=worker_slots) as program:
        program.step()
        worker_slots.leave(1)
        worker_slots.join(1)
        report = program.step()
        assert (report.members, report.joined) == ((0, 1, 2, 3), (1,))
        assert report.notes == ("a worker has joined in worker slot 1.",)


def test_operator_states_of_a_joining_worker_are_those_of_the_others(worker_slots):
    def driver(state, batch):
        mean = comm.all_reduce(batch["x"].mean())
        return state + mean, {"ema": mon.ema(mean, decay=0.5)}

    with build(driver, jnp.zeros(()), data_of(), 16, world=worker_slots) as program, alone_with(driver) as alone:
        for change in (
            None,
            lambda: worker_slots.leave(0),
            None,
            lambda: worker_slots.join(0),
            lambda: worker_slots.leave(1),
        ):
            if change:
                change()
            found, expected = program.step().metrics["ema"], alone.step().metrics["ema"]
            assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_policies_forget_the_worker_that_has_left(worker_slots):
    """A worker without measurements delays decisions until it has some."""
    shown = []

    def update(observation, state):
        steps = state + (np.asarray(observation.batch_sizes) > 0)
        shown.append((observation.step, observation.members, observation.joined, steps.tolist()))
        return None, steps

    policy = ctrl.Policy(lambda n: np.zeros(n), update, "counts")

    def driver(state, batch):
        ctrl.hook(policy, every=3)
        return descend(state, batch)

    with build(driver, jnp.zeros(()), data_of(), 16, world=worker_slots) as program:
        for step in range(1, 10):
            if step == 3:
                worker_slots.leave(1)
            if step == 5:
                worker_slots.join(1)
            program.step()
    assert [joined for _, _, joined, _ in shown] == [(), (), (), (), (1,), (), (), (), ()]
    assert [s for s, *_ in shown] == list(range(1, 10))
    assert shown[3][1:] == ((0, 2, 3), (), [4, 2, 4, 4])
    assert shown[4][3] == [5, 1, 5, 5]
    assert shown[8][3] == [9, 5, 9, 9]


def test_an_absent_clients_data_is_not_used(worker_slots):
    shards = ad.Shards([{"x": np.full((12, 2), float(n + 1), np.float32)} for n in range(4)])

    def driver(state, batch):
        return state, {
            "sum": comm.all_reduce(batch["x"].sum(), op="sum"),
            "least": comm.all_reduce(batch["x"].min(), op="min"),
        }

    with build(driver, jnp.zeros(()), shards, 12, world=worker_slots) as program:
        report = program.step()
        assert float(report.metrics["least"]) == 1
        worker_slots.leave(0)
        report = program.step()
        assert float(report.metrics["least"]) == 2
        assert program._parts.stream.cursors[0] == 3
        program.step()
        worker_slots.join(0)
        assert float(program.step().metrics["least"]) == 1
        assert program._parts.stream.cursors[0] == 6


def test_the_broadcasting_worker_must_be_a_member(worker_slots):
    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean()), {"first": comm.broadcast(batch["x"].mean(), root=2)}

    with pytest.raises(ad.BatchSizeError, match="worker 2 must take at least one example"):
        build(driver, jnp.zeros(()), data_of(), 16, world=worker_slots, shares=[1, 1, 0, 1])
    with build(driver, jnp.zeros(()), data_of(), 16, world=worker_slots) as program:
        program.step()
        with pytest.raises(ad.BatchSizeError, match="worker 2 must take at least one example"):
            program.rescale(shares=[1, 1, 0, 1])
        worker_slots.leave(2)
        with pytest.raises(ad.BatchSizeError, match="worker 2 must take at least one example"):
            program.step()


def test_a_noise_scale_needs_two_groups_which_a_lone_worker_makes_of_its_batch(worker_slots):
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state, batch)
        avg = comm.all_reduce(grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, avg), mon.noise_scale(grads, avg)

    options = {"shares": [0, 0, 1, 0], "deterministic": True}
    with build(driver, adam_state()["params"], make_data(), 16, world=worker_slots, **options) as program:
        for shares, calls in (([0, 0, 1, 0], [(), (), (8, 8), ()]), ([1, 0, 1, 0], [(8,), (), (8,), ()])):
            program.rescale(shares=shares)
            report = program.step()
            assert list(map(tuple, report.microbatches)) == calls
            noise = report.metrics
            assert np.isfinite([float(x) for x in (noise.scale, noise.trace, noise.signal)]).all()


def test_a_program_begins_in_a_world_with_an_empty_worker_slot(worker_slots):
    worker_slots.leave(3)
    with build(descend, jnp.zeros(()), data_of(), 3, world=worker_slots) as program:
        assert program.batch_sizes == (1, 1, 1, 0)
        assert program.step().members == (0, 1, 2)
    with pytest.raises(ad.BatchSizeError, match="only to worker slot 3, which is empty"):
        build(descend, jnp.zeros(()), data_of(), 3, world=worker_slots, shares=[0, 0, 0, 1])


def test_if_all_workers_with_examples_left_the_others_get_them(worker_slots):
    with build(descend, jnp.zeros(()), data_of(), 16, world=worker_slots, shares=[1, 0, 0, 0]) as program:
        program.step()
        worker_slots.leave(0)
        assert program.step().batch_sizes == (0, 6, 5, 5)
