"""Steps of several processes that `jax.distributed` joins, each as one program, and what becomes of a lost process."""

from __future__ import annotations

import re
import threading

import jax
import numpy as np
import pytest

import collectives as comm
from adaptive.base.errors import DisagreementError, WorkerError
from adaptive.runtime.fused_step import FusedStep
from tests.adaptive.runtime.test_fused_step import (
    STEPS,
    built,
    of_many_kinds,
    of_their_own,
    plain,
    same,
    same_courses,
    spoilt,
)
from tests.jaxrun import run

pytestmark = pytest.mark.ranks
together = pytest.mark.on_ranks(2, jax=True)


@pytest.fixture(scope="module")
def world():
    """Four workers."""
    with comm.JaxWorld(jax.local_devices()[: 4 // jax.process_count()]) as world:
        yield world


@pytest.fixture
def taken(monkeypatch):
    """By step: whether it was taken by one program."""
    seen, take = {}, FusedStep.__call__

    def noted(self, share, readings, *args, **options):
        outcome = take(self, share, readings, *args, **options)
        seen[readings[0].step + 1] = outcome is not None
        return outcome

    monkeypatch.setattr(FusedStep, "__call__", noted)
    return seen


def course(world, driver, steps=STEPS, **options):
    with built(driver, world=world, **options) as program:
        reports = [program.step() for _ in range(steps)]
        own = [np.asarray(leaf) for state in program._parts.engine.states for leaf in state]
        return reports, program.state, own


def equal_on_all(world, value):
    return len(set(world.all_gather_bytes(repr(value).encode()))) == 1


# What a driver needs of the messages is tested on one process; here, what is another on several.
@together
@pytest.mark.parametrize("driver", [of_many_kinds, of_their_own, spoilt], ids=lambda driver: driver.__name__)
def test_both_give_the_same_states_and_reports(world, driver, taken, monkeypatch):
    mine = course(world, driver)
    assert sum(taken.values()) >= 5
    assert equal_on_all(world, taken)
    monkeypatch.setattr(FusedStep, "fits", lambda *_: False)
    other = course(world, driver)
    same_courses(mine, other, driver)


@together
def test_without_determinism_all_processes_switch_to_the_program_in_the_same_step(world, taken):
    """Whichever process has compiled it last."""
    with built(plain, world=world, deterministic=False, resizable=False) as program:
        compile_step = program._parts.engine.kernels.compiled.compile_step
        may_compile = threading.Event()
        program._parts.engine.kernels.compiled.compile_step = lambda size: (may_compile.wait(), compile_step(size))
        if world.rank == 0:
            may_compile.set()
        for step in range(1, 20):
            if step == 5:
                assert not taken
                may_compile.set()
                program.warm_up()
            program.step()
    assert equal_on_all(world, taken)
    assert sorted(taken) == [9, 10, 11, 12, 13, 14, 15, 17, 18, 19]


@together
def test_processes_may_compile_programs_in_different_orders(world, taken):
    with built(plain, world=world, global_batch=2 * world.capacity) as program:
        orders = [(1,), (4,)] if world.rank else [(4,), (1,)]
        for microbatches in orders:
            program._parts.engine.fused.compile(microbatches)
        for size in (4, 1):
            program.rescale(global_batch=size * world.capacity)
            program.step()
            program.step()
    assert sum(taken.values()) >= 2


@together
def test_if_one_process_cannot_compile_the_program_all_continue_without_it(world, taken, monkeypatch, caplog):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room for the program\nand more")

    with built(plain, world=world) as program:
        if world.rank == world.processes - 1:
            monkeypatch.setattr("adaptive.runtime.fused_step.FusedProgram", fails)
        for _ in range(3):
            program.step()
        assert program.steps == 3
    assert not taken
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    which = f" on rank {world.processes - 1}" * (world.processes > 1)
    assert f"compiled{which}: JaxRuntimeError: RESOURCE_EXHAUSTED" in warning.message
    assert "for the program. Steps continue" in warning.message


@together
def test_another_collective_or_a_failure_raises_before_the_state_is_donated(world, taken):
    def broken(sizes):
        raise ZeroDivisionError("no rows")

    with built(plain, world=world) as program:
        for _ in range(4):
            program.step()
        before = jax.tree.map(np.asarray, program.state)
        with pytest.raises(DisagreementError, match=r"rank 0: step 5 of program .* as one program"):
            world.barrier() if world.rank else program.step()
        same(program.state, before)
        if world.rank:
            program._parts.stream.prefetch = broken
        with pytest.raises(ZeroDivisionError if world.rank else WorkerError, match="no rows"):
            program.step()
        same(program.state, before)
    assert taken == {1: True, 3: True}


# --- one is lost ------------------------------------------------------------------------------------------------------

LOST = """
import os, signal, sys, time
from tests.jaxrun import join
from tests.speed import at_start
join()
import jax, numpy as np
import adaptive as ad, collectives as comm
from adaptive.runtime.fused_step import FusedStep
from tests.adaptive.runtime.test_fused_step import built, plain

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

with comm.world(hang_timeout=3 * at_start(), devices=jax.local_devices()[:1]) as world:
    program = built(plain, world=world)
    for _ in range(4):
        program.step()
    if world.rank:
        match sys.argv[1]:
            case "before": killed()
            case "within": FusedStep._run = killed
            case "stopped": FusedStep._run = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        program.step()
    except ad.WorkerError as error:
        print(f"heard: {error}", *error.__notes__, flush=True)
        try:
            print("the state:", program.state["params"]["b"], flush=True)
        except ad.WorkerError as lost:
            print("the state:", lost, flush=True)
        raise
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "heard"),
    [
        ("before", r"rank 1 has closed its connection.*The state of .* is that of step 4(.|\n)*the state: [-0-9.]+\n"),
        ("within", r".*Gloo(.|\n)*The state of .* is lost with step 5(.|\n)*the state: .*program\.restore"),
    ],
)
def test_where_one_is_lost_the_others_hear_of_it_and_end(tmp_path, how, heard):
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    results = run([script, how], timeout=60, expect_failure=True)
    lost = "heard: rank 0 of 2 lost the connection to the others in step 5 of .* as one program: "
    assert re.search(lost + heard, results[0].stdout), results[0]
    assert results[0].returncode != 134, results[0]  # JAX's way to end whom it has waited for


@pytest.mark.long
def test_a_process_stopped_within_a_step_is_named_and_ended(tmp_path):
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    results = run([script, "stopped"], timeout=60, expect_failure=True)
    assert results[1].returncode == -9
    assert re.search(r"rank 1 \(.*is stopped", results[0].stderr), results[0]
