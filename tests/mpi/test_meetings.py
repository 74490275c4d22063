"""Ranks in different operations at once: all of them raise, and none waits for ever.

What one rank raises all raise, so the next test finds them together. See tests/ranks.py.
"""

from __future__ import annotations

import os
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.fused_step import FusedStep
from tests.problems import build, descend, make_data, same_everywhere
from tests.speed import limit

pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2)]

N = 16
KIND = os.environ.get("TESTS_WORLD", "mpi")


def make_world() -> comm.MPIWorld | comm.JaxWorld:
    return (comm.JaxWorld if KIND.startswith("jax") else comm.MPIWorld)(devices=jax.local_devices()[:1])


@pytest.fixture(scope="module")
def world():
    with make_world() as world:
        assert world.processes > 1
        yield world


@pytest.fixture(autouse=True)
def _steps_by_messages(monkeypatch):
    """Without one program for all devices, whose operations tests/adaptive/test_fused_on_jax_processes.py tests."""
    monkeypatch.setattr(FusedStep, "fits", lambda *_: False)


def odd(world) -> bool:
    """Whether this is the rank that goes its own way."""
    return world.rank == world.processes - 1


def local(state, batch):
    """With state of each worker's own, so that a checkpoint communicates."""
    new, metrics = descend(state["all"], batch)
    return {"all": new, "own": state["own"] + batch["x"].mean()}, metrics


def meet(world, mine, others, *texts, match="ranks are in different collectives"):
    """The odd rank does `mine` and the rest `others`; all raise, with all the texts. Returns the error."""
    with pytest.raises(ad.DisagreementError, match=match) as caught:
        mine() if odd(world) else others()
    text = str(caught.value)
    for part in texts:
        assert part in text, text
    assert "test_meetings.py:" in text or "problems.py:" in text
    assert float(comm.all_gather(world.rank)[-1]) == world.processes - 1  # the world is as good as before
    return caught.value


# --- steps, and what else a program does together ---------------------------------------------------------------------


def test_two_programs_in_different_orders(world):
    """Their gradients were once mixed: both have messages of one shape."""
    p, q = (build(descend, start, make_data(), N, world=world) for start in (0.0, 5.0))
    with p, q:
        error = meet(world, q.step, p.step, f"message 1 of step 1 of {p._name}", f"message 1 of step 1 of {q._name}")
        assert any("is that of step 0" in note for note in error.__notes__)
        assert (float(p.state), float(q.state)) == (0.0, 5.0)
        assert p.steps == q.steps == 0
        for program in (p, q, p):  # and can go on from there
            program.step()
        assert same_everywhere(world, (p.state, q.state))


@pytest.mark.parametrize("what", ["evaluate", "checkpoint", "build", "eager"])
def test_another_call_on_one_rank_while_others_step(world, what):
    data = make_data()
    with build(local, {"all": 0.0, "own": 0.0}, data, N, world=world, per_worker_state=lambda s: s["own"]) as program:
        program.step()
        do, said = {
            "evaluate": (
                lambda: program.evaluate(lambda s, b: jnp.square(b["x"]).mean(), data),
                f"evaluate of {program._name} after step 1 (",
            ),
            "checkpoint": (program.checkpoint, f"a checkpoint of {program._name} after step 1 ("),
            "build": (lambda: build(descend, 0.0, data, N, world=world), "building program"),
            "eager": (lambda: comm.all_reduce(1.0, op="sum"), "all_reduce(op='sum') of float32[], outside a program ("),
        }[what]
        before = program.state
        meet(world, do, program.step, f"message 1 of step 2 of {program._name} (", said)
        assert program.steps == 1
        assert float(program.state["all"]) == float(before["all"])
    with build(descend, 0.0, data, N, world=world) as program:  # all count their programs alike
        program.step()


# --- one rank fails, wherever the others are --------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["evaluate", "step"])
def test_a_rank_that_fails_in_evaluate(world, where):
    def bad(state, batch):
        if odd(world):
            raise ArithmeticError("no such mean")
        return batch["x"].mean()

    with build(descend, 0.0, make_data(), N, world=world) as program:
        others = {"evaluate": lambda: program.evaluate(bad, make_data()), "step": program.step}[where]
        with pytest.raises(ArithmeticError if odd(world) else ad.WorkerError) as caught:
            program.evaluate(bad, make_data()) if odd(world) else others()
        if not odd(world):
            why = f"rank {world.processes - 1} failed in evaluate of {program._name}: ArithmeticError: no such mean"
            assert str(caught.value).startswith(why)
            assert "test_meetings.py:" in str(caught.value)
        program.step()  # all are together again


# --- threads ----------------------------------------------------------------------------------------------------------


def in_threads(*works):
    """Return what each of them raises or returns, side by side; each within a time limit."""
    results = [None] * len(works)

    def run(i, work):
        try:
            results[i] = work()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i, work), daemon=True) for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(60))
        assert not thread.is_alive()
    return results


def train(program, steps=6):
    return [float(report.metrics["loss"]) for report in program.run(steps=steps)]


def adapting(state, batch):
    state, metrics = descend(state, batch)
    ctrl.hook(lambda control, loss: control.rescale(global_batch=N + 2 * control.step), metrics["loss"])
    return state, metrics


def test_two_programs_in_two_threads_with_a_world_each():
    with make_world() as one, make_world() as other:
        options = [{"world": one}, {"world": other, "seed": 7}]

        def alone(**options):
            with build(adapting, 0.0, make_data(), N, deterministic=True, resizable=True, **options) as program:
                program.warm_up()
                losses = train(program)
                return losses, float(program.state), program.batch_sizes

        expected = [alone(**o) for o in options]
        found = in_threads(*(lambda o=o: alone(**o) for o in options))
        assert found == expected
        assert same_everywhere(one, found)


def test_two_programs_in_two_threads_with_one_world():
    """They come to it in different orders."""
    with make_world() as world:
        p, q = (build(descend, start, make_data(), N, world=world) for start in (0.0, 5.0))
        first, second = (q, p) if odd(world) else (p, q)
        over = threading.Event()

        def begin():
            try:
                train(first)
            finally:
                over.set()

        def follow():
            while not world.transport.lock.locked() and not over.is_set():  # the first waits in its message
                time.sleep(0.001)
            train(second)

        for error in in_threads(begin, follow):
            assert isinstance(error, ad.DisagreementError), error
            assert "Threads share this world" in str(error)
            advice = "Run one program after another" if KIND.startswith("jax") else "world=comm.MPIWorld()"
            assert advice in str(error)
        assert (float(p.state), float(q.state)) == (0.0, 5.0)
        world.barrier()


def test_programs_and_collectives_outside_of_any_block(world):
    """The world is entered in this thread; a fresh context has none, and the launcher says that there are more."""
    for work in (lambda: build(descend, 0.0, make_data(), N), lambda: comm.all_reduce(1.0, op="sum")):
        (error,) = in_threads(work)
        assert isinstance(error, ad.DriverError)
        assert "with comm.world()" in str(error)
