"""Checkpoints on disk, of several ranks: one writes, all read the same, and what one cannot do all hear of.

The directory is rank 0's; all see it. See tests/ranks.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import adaptive as ad
import collectives as comm
from adaptive.disk.folders import checkpoints
from adaptive.disk.lock import LOCK
from adaptive.program.run_checkpointer import RunCheckpointer
from tests.problems import build, descend, make_data, same_everywhere

pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2)]

N = 16


@pytest.fixture(scope="module")
def world():
    with comm.MPIWorld() as world:
        assert world.processes > 1
        yield world


@pytest.fixture
def directory(world, tmp_path):
    """One that all ranks see."""
    return Path(world.all_gather_bytes(str(tmp_path).encode())[0].decode()) / "run"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A fast disk: no due checkpoint is skipped because of the previous one."""
    write = RunCheckpointer._write
    monkeypatch.setattr(RunCheckpointer, "_write", lambda self, checkpoint: (write(self, checkpoint), self.wait()))


def odd(world) -> bool:
    return world.rank == world.processes - 1


def names(world, directory) -> list[str]:
    """Of the checkpoints, when all are here."""
    world.barrier()
    found = [path.name for path in reversed(checkpoints(directory))]
    world.barrier()
    return found


def local(state, batch):
    """With state of each worker's own, so that a checkpoint communicates."""
    new, metrics = descend(state["all"], batch)
    return {"all": new, "own": state["own"] + batch["x"].mean()}, metrics


def test_one_rank_writes_and_all_resume(world, directory):
    with build(descend, 0.0, make_data(), N, world=world) as program:
        owners = set()
        for _ in program.run(steps=5, checkpoint=ad.Checkpoints(directory, every=2)):
            owners.add((directory / LOCK).read_text().split(" on ")[0])
        assert (owners == {f"process {os.getpid()}"}) == (world.rank == 0)
        assert names(world, directory) == ["000001-step-2", "000002-step-4", "000003-step-5"]
        after = [program.step().metrics["loss"].item() for _ in range(3)]
    with build(descend, 9.0, make_data(), N, world=world) as other:
        other.restore(directory)
        assert other.steps == 5
        assert [other.step().metrics["loss"].item() for _ in range(3)] == after


def test_minutes_are_those_of_rank_0(world, directory, monkeypatch):
    """Each rank has its own clock; that of rank 0 counts, and all save a checkpoint of the same step."""
    now = [0.0]
    monkeypatch.setattr("adaptive.program.run_checkpointer.time", SimpleNamespace(monotonic=lambda: now[0]))
    start = {"all": 0.0, "own": 0.0}
    with build(local, start, make_data(), N, world=world, per_worker_state=lambda state: state["own"]) as program:
        for _ in program.run(steps=7, checkpoint=ad.Checkpoints(directory, every="1 minute", keep=9)):
            now[0] += 25 if world.rank == 0 else 1000
    steps = [int(name.split("-")[-1]) for name in names(world, directory)]
    assert steps == [5, 7]  # a minute has passed before step 4, which tells the others with step 5


def test_all_ranks_save_and_stop_and_rank_0_knows_the_best(world, directory):
    start, best = {"all": 0.0, "own": 0.0}, ad.Checkpoints(directory, every=100, keep=1, keep_best=("val", "min"))
    with build(local, start, make_data(), N, world=world, per_worker_state=lambda state: state["own"]) as program:
        for report in program.run(checkpoint=best):
            if world.rank == 0:
                program.log(val=abs(report.step - 2))
            if report.step == 4:
                program.stop()
            else:
                program.save()
                assert names(world, directory)[-1].endswith(f"step-{report.step}")
        assert program.steps == 4
        assert names(world, directory) == ["000002-step-2", "000004-step-4"]
        program.restore(best.best())
        assert program.steps == 2


def test_all_ranks_restore_the_selection_of_rank_0(world, directory):
    with build(descend, 0.0, make_data(), N, world=world) as program:
        list(program.run(steps=4, checkpoint=ad.Checkpoints(directory, every=2)))
        world.barrier()
        if world.rank == 0:
            (directory / "000002-step-4" / "state" / "leaves.json").unlink()
        world.barrier()
        program.restore(directory)
        assert program.steps == 2
        (note,) = program.step().notes
        assert "the checkpoint 000002-step-4 is skipped: " in note
        assert same_everywhere(world, [note, program.state])


def hears(world, own_error, text, heard):
    """What rank 0 raises, and what the others hear of it."""
    return pytest.raises(own_error if world.rank == 0 else ad.WorkerError, match=text if world.rank == 0 else heard)


def test_a_directory_that_cannot_be_written_ends_the_run_on_all(world, tmp_path):
    (tmp_path / "file").touch()
    with build(descend, 0.0, make_data(), N, world=world) as program:
        with hears(world, ad.CheckpointError, "no checkpoints can be written", "rank 0 failed in opening the check"):
            list(program.run(steps=3, checkpoint=ad.Checkpoints(tmp_path / "file")))
        assert program.steps == 0
        program.step()  # they are together


def test_a_rank_that_does_not_see_the_directory(world, directory, tmp_path):
    with build(descend, 0.0, make_data(), N, world=world) as program:
        list(program.run(steps=1, checkpoint=ad.Checkpoints(directory)))
        world.barrier()
        path = tmp_path / "elsewhere" if odd(world) else directory
        with pytest.raises(ad.CheckpointError if odd(world) else ad.WorkerError) as caught:
            program.restore(path)
        assert f"rank {world.processes - 1} cannot read" in str(caught.value)
        assert ("elsewhere/000001-step-1, which rank 0 selected: " in str(caught.value)) or not odd(world)
        program.step()
