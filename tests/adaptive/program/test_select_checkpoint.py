"""A directory may be read while a run writes to it: where its writer deletes a checkpoint, the next one is read."""

from __future__ import annotations

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.disk import arrays, directory
from adaptive.disk.directory import checkpoints
from adaptive.program.select_checkpoint import select_checkpoint
from adaptive.program.stored import load
from adaptive.runtime.local_world import LocalWorld

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


def once(monkeypatch, module, name, before=None, behind=None, error=None):
    """Have a function of a module do something more when it is called first, and raise or not."""
    original, calls = getattr(module, name), []

    def wrapped(*args, **kwargs):
        calls.append(args)
        first = len(calls) == 1
        if first and before:
            before()
        if first and error:
            raise error
        found = original(*args, **kwargs)
        if first and behind:
            behind()
        return found

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
@pytest.mark.parametrize(
    ("module", "name", "when"),
    [
        (directory, "verify", "before"),  # while its files are compared with their checksums
        (directory, "verify", "behind"),
        (arrays, "read", "before"),  # while its arrays are read
        (arrays, "read", "behind"),
    ],
)
def test_the_newer_one_is_read(run, monkeypatch, how, module, name, when):
    calls = once(monkeypatch, module, name, **{when: lambda: finishes_a_newer_one(run)})
    assert how(run) == 3
    assert len(calls) >= 2
    assert [path.name for path in checkpoints(run)] == ["000004-step-3"]


@pytest.mark.parametrize("how", READ.values(), ids=READ)
@pytest.mark.parametrize("error", [ValueError("Not enough data"), AttributeError("NoneType has no attribute tree")])
def test_missing_files_are_recognized_by_any_error_of_the_library(run, monkeypatch, how, error):
    once(monkeypatch, arrays, "read", before=lambda: finishes_a_newer_one(run), error=error)
    assert how(run) == 3


@pytest.mark.parametrize("how", READ.values(), ids=READ)
def test_an_unreadable_checkpoint_is_an_error(run, monkeypatch, how):
    once(monkeypatch, arrays, "read", error=ValueError("Not enough data"))
    with pytest.raises(ad.CheckpointError, match="000003-step-3 cannot be read: ValueError: Not enough data"):
        how(run)


@pytest.mark.parametrize("how", READ.values(), ids=READ)
def test_a_directory_that_is_emptied_meanwhile_holds_nothing(run, monkeypatch, how):
    once(monkeypatch, arrays, "read", before=lambda: [shutil.rmtree(path) for path in checkpoints(run)])
    with pytest.raises(ad.CheckpointError, match="holds no checkpoint"):
        how(run)


def test_a_named_checkpoint_that_was_deleted_is_an_error(run, monkeypatch):
    once(monkeypatch, arrays, "read", before=lambda: finishes_a_newer_one(run))
    with build() as program, pytest.raises(ad.CheckpointError, match="000002-step-2 does not exist"):
        program.restore(run / "000002-step-2")


class OfTwo(LocalWorld):
    """The first of two processes; the other agrees, but once reports that its checkpoint was deleted."""

    def __init__(self):
        super().__init__()
        self.said = []

    def all_gather_bytes(self, value, about="", more=""):
        self.said.append((about, value))
        reads = sum(about.startswith("reading") for about, _ in self.said)
        other = b"deleted" if reads == 1 and about.startswith("reading") else b""
        return [value, other]


def test_all_processes_select_again_if_one_read_too_late(run):
    world = OfTwo()
    found = select_checkpoint(world, run, False, "restore of a program")
    assert found is not None
    assert found.checkpoint["step"] == 3
    assert [about.split()[0] for about, _ in world.said] == ["choosing", "reading"] * 2


# --- a checkpoint that was renamed ------------------------------------------------------------------------------------


def test_a_renamed_checkpoint_is_passed_over_with_a_note(run):
    (run / "000003-step-3").rename(run / "000003-step-9")
    with build() as program:
        program.restore(run)
        assert program.steps == 2
        (note,) = program.step().notes
    assert "the checkpoint 000003-step-9 is skipped: it holds step 3, but its name says step 9" in note


def test_where_all_are_renamed_that_is_an_error(run):
    for path in checkpoints(run):
        path.rename(run / f"{path.name}0")
    with pytest.raises(ad.CheckpointError, match=r"(?s)are damaged:.*holds step 3, but its name says step 30.*step 2,"):
        ad.Checkpoints(run).read()


def test_a_renamed_checkpoint_that_was_named_is_refused(run):
    path = (run / "000001-step-1").rename(run / "000001-step-7")
    with build() as program, pytest.raises(ad.CheckpointError, match="holds step 1, but its name says step 7"):
        program.restore(path)


def test_under_a_name_of_another_kind_it_may_be_read(run, tmp_path):
    shutil.copytree(run / "000002-step-2", tmp_path / "best")
    assert load(tmp_path / "best")["step"] == 2
