"""Processes that die at each operation in turn of all that a program does: what the others train is what it must be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.control import hosts
from adaptive.disk.folders import checkpoints, read
from tests.problems import stream
from tests.threaded_world import Job, ThreadedWorld

EXAMPLES, BATCH, STEPS, SEED = 60, 12, 4, 3
DATA = {"x": np.arange(EXAMPLES, dtype=np.float32), "number": np.arange(EXAMPLES)}
WHO = [(0,), pytest.param((1, 2), marks=pytest.mark.long)]


def driver(state, batch):
    """Counts how often each example was taken, and takes a step whose result all examples decide."""
    taken = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
    mean = comm.all_reduce(batch["x"].mean())
    return {"taken": state["taken"] + taken, "sum": state["sum"] + mean}, {"mean": mean}


@pytest.fixture(autouse=True)
def as_many_operations_in_each_run(monkeypatch):
    """However long the last checkpoint takes, rank 0 answers once that it is on the disk."""
    monkeypatch.setattr("adaptive.program.run_checkpointer._ANSWER_SECONDS", 60.0)


BUILDING = 2  # operations of a build, in `test_while_a_program_is_built_and_trained`; other tests begin after them
NUMBERS = stream(EXAMPLES, SEED, STEPS * BATCH)
MEANS = DATA["x"][NUMBERS].reshape(STEPS, BATCH).mean(1)


def built(world: ThreadedWorld | None = None, driver=driver, **options: Any) -> ad.Program:
    begun = {"taken": jnp.zeros(EXAMPLES, jnp.int32), "sum": jnp.zeros(())}
    return ad.Program(driver, begun, DATA, global_batch=BATCH, world=world, seed=SEED, **options)


def check(program: ad.Program, reports: list[ad.Report]) -> None:
    """Results are those of one worker, and no worker's share is missing."""
    np.testing.assert_array_equal(program.state["taken"], np.bincount(NUMBERS, minlength=EXAMPLES))
    np.testing.assert_allclose([r.metrics["mean"] for r in reports], MEANS[STEPS - len(reports) :], rtol=1e-6)
    np.testing.assert_allclose(program.state["sum"], MEANS.sum(), rtol=1e-6)
    for report in reports:
        assert report.global_batch == sum(report.batch_sizes) == BATCH
        assert [worker_slot for worker_slot, size in enumerate(report.batch_sizes) if size] == list(report.members)


def dying(script: Callable[[ThreadedWorld], Any], who: tuple[int, ...], first: int = 0) -> list[str]:
    """Run a script without losses, and then once per operation, from `first` on: these processes die at each in turn.
    Returns the operations without losses.
    """
    lives = next(number for number in range(3) if number not in who)
    calm = Job(3)
    calm.run(script)
    for at in range(first, len(calm.operations[lives])):
        job = Job(3, dict.fromkeys(who, at))
        try:
            returned = job.run(script)
        except Exception as error:
            error.add_note(f"{who} died at operation {at}, {calm.operations[who[0]][at]}")
            raise
        assert sorted(returned) == [number for number in range(3) if number not in who]
    return calm.operations[lives]


@pytest.mark.parametrize("who", WHO)
def test_while_a_program_is_built_and_trained(who):
    def script(world):
        with built(world) as program:
            reports = list(program.run(steps=STEPS))
            check(program, reports)
            assert [loss for report in reports for loss in report.lost] == list(world.losses)
            assert program.members == world.members

    operations = dying(script, who)
    assert ["step" in said for said in operations].index(True) == BUILDING
    assert all("building program" in said for said in operations[:BUILDING])


@pytest.mark.parametrize("who", WHO)
def test_from_restoring_to_the_last_checkpoint(who, tmp_path):
    """Rank 0 alone knows which checkpoint is restored, and writes those of the run."""
    before = tmp_path / "before"
    with built() as program:
        list(program.run(steps=1, checkpoint=ad.Checkpoints(before, every="1 step")))

    def script(world):
        folder = tmp_path / world.job.name
        with built(world, resizable=False) as program:
            program.restore(before)
            assert program.steps == 1
            reports = list(program.run(steps=STEPS - 1, checkpoint=ad.Checkpoints(folder, every="2 steps")))
            check(program, reports)
            mean = program.evaluate(lambda state, batch: batch["x"].mean(), DATA, batch=7)
            np.testing.assert_allclose(mean, DATA["x"].mean(), rtol=1e-6)
            kept = read(checkpoints(folder)[0])
            assert kept["step"] == STEPS
            np.testing.assert_array_equal(kept["state"]["taken"], program.state["taken"])

    assert any("choosing the checkpoint" in said for said in dying(script, who, first=BUILDING))


def mixed(state, batch):
    """Two leaves of each worker's own that are always equal."""
    own = state["own"] + ad.worker_index() + 1
    return {**state, "own": own, "same": own}, {"mean": comm.all_reduce(batch["x"].mean())}


@pytest.mark.long
@pytest.mark.parametrize("who", WHO)
def test_while_a_checkpoint_of_local_state_is_taken(who, tmp_path):
    """Each of its leaves takes an operation; a worker's row is its own in all of them, or in none."""

    def script(world):
        folder = tmp_path / world.job.name
        state = {"own": jnp.zeros((), int), "same": jnp.zeros((), int)}
        options = {"global_batch": BATCH, "per_worker_state": lambda s: s, "seed": SEED}
        with ad.Program(mixed, state, DATA, world=world, **options) as program:
            list(program.run(steps=STEPS, checkpoint=ad.Checkpoints(folder, every="100 steps")))
            for kept in (program.checkpoint(), read(checkpoints(folder)[0])):
                np.testing.assert_array_equal(kept["state"]["own"], kept["state"]["same"])
                own = STEPS * (np.arange(3) + 1)
                assert all(kept["state"]["own"][worker_slot] in (own[worker_slot], 0) for worker_slot in range(3))
                assert all(kept["state"]["own"][worker_slot] == own[worker_slot] for worker_slot in world.members)

    dying(script, who, first=BUILDING)


@pytest.mark.long
def test_where_one_process_decides_for_all(monkeypatch):
    """On machines of several kinds the first process's decisions count; in the last step they are not compared."""
    kinds = itertools.count()
    monkeypatch.setattr(hosts, "kind_of_machine", lambda devices: f"kind {next(kinds)}")

    def deciding(state, batch):
        ctrl.hook(lambda control: control.rescale(global_batch=BATCH + control.step))
        return driver(state, batch)

    def script(world):
        with built(world, deciding, deterministic=True) as program:
            reports = list(program.run(steps=STEPS))
            examples = sum(report.global_batch for report in reports)
            taken = np.bincount(stream(EXAMPLES, SEED, examples), minlength=EXAMPLES)
            np.testing.assert_array_equal(program.state["taken"], taken)
            assert program.global_batch == BATCH + STEPS

    operations = dying(script, (0,), first=BUILDING)
    assert sum("decision" in said for said in operations) == STEPS
    assert any("the end of run()" in said for said in operations)
