"""A directory may be read while a run writes to it: where its writer deletes a checkpoint, the next one is read."""

from __future__ import annotations

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.disk import folders
from adaptive.disk.folders import checkpoints

COVERS = ("adaptive/program/restore.py",)


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {}


def build():
    return ad.Program(driver, jnp.zeros(3), {"x": np.ones(40, np.float32)}, global_batch=10)


@pytest.fixture
def run(tmp_path):
    """A directory with the checkpoints of steps 1, 2 and 3."""
    with build() as program:
        for step in range(1, 4):
            list(program.run(steps=1, checkpoint=ad.Checkpoints(tmp_path / "run", every=1)))
            assert program.steps == step
    assert [path.name for path in checkpoints(tmp_path / "run")] == [f"{n:06}-step-{n}" for n in (3, 2, 1)]
    return tmp_path / "run"


def finishes_a_newer_one(run):
    """What a writer does that keeps one checkpoint: a new one is finished, and all others are deleted."""
    path, *older = checkpoints(run)
    number = int(path.name[:6]) + 1
    new = run / f".unfinished-{number}"
    shutil.copytree(path, new)
    new.rename(run / f"{number:06}-step-3")
    for each in [path, *older]:
        each.rename(run / f".unfinished-{each.name}")
        shutil.rmtree(run / f".unfinished-{each.name}")


def once(monkeypatch, module, name, before=None, error=None):
    """Have a function of a module do something more when it is called first, and raise or not."""
    original, calls = getattr(module, name), []

    def wrapped(*args, **kwargs):
        calls.append(args)
        first = len(calls) == 1
        if first and before:
            before()
        if first and error:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapped)
    return calls


READ = {
    "read": lambda run: ad.Checkpoints(run).read()["step"],
    "restore": lambda run: restored(run),
}


def restored(run):
    with build() as program:
        program.restore(run)
        return program.steps


@pytest.mark.parametrize("how", READ.values(), ids=READ)
def test_the_newer_one_is_read(run, monkeypatch, how):
    calls = once(monkeypatch, folders, "read", before=lambda: finishes_a_newer_one(run))
    assert how(run) == 3
    assert len(calls) >= 2
    assert [path.name for path in checkpoints(run)] == ["000004-step-3"]


def test_a_note_says_why_the_newest_cannot_be_read(run):
    (run / "000003-step-3" / "state" / "arrays.npy").write_bytes(b"")
    with build() as program:
        program.restore(run)
        assert program.steps == 2
        (note,) = program.step().notes
    why = f"{run}/000003-step-3 cannot be read: EOFError: No data left in file"
    assert note == f"the checkpoint 000003-step-3 is skipped: {why}"


@pytest.mark.parametrize("how", READ.values(), ids=READ)
def test_a_directory_that_is_emptied_meanwhile_holds_nothing(run, monkeypatch, how):
    once(monkeypatch, folders, "read", before=lambda: [shutil.rmtree(path) for path in checkpoints(run)])
    with pytest.raises(ad.CheckpointError, match="holds no checkpoint"):
        how(run)


def test_a_named_checkpoint_that_was_deleted_is_an_error(run, monkeypatch):
    once(monkeypatch, folders, "read", before=lambda: finishes_a_newer_one(run))
    with build() as program, pytest.raises(ad.CheckpointError, match="000002-step-2 does not exist"):
        program.restore(run / "000002-step-2")
