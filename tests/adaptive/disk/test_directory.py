"""Directories of checkpoints: the newest, retention, and leftovers of a failed writer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from adaptive.disk.directory import (
    belongs_to,
    checkpoints,
    commit,
    newest_verified,
    prune,
    record_owner,
    run_of,
    step_of,
    sweep,
)
from adaptive.disk.lock import HeldError
from adaptive.disk.manifest import DamagedError
from tests.adaptive.disk.folders import fill, write
from tests.speed import limit


def test_the_newest_checkpoint_is_the_last_written(tmp_path):
    assert newest_verified(tmp_path) is None
    assert newest_verified(tmp_path / "no such") is None
    paths = [write(tmp_path, step) for step in (10, 400, 20)]
    assert [path.name for path in paths] == ["000001-step-10", "000002-step-400", "000003-step-20"]
    assert newest_verified(tmp_path).path == paths[-1]
    assert newest_verified(paths[1]).path == paths[1]


def test_step_numbers_may_exceed_six_digits(tmp_path):
    write(tmp_path, 1).rename(tmp_path / "999999-step-1")
    assert write(tmp_path, 2).name == "1000000-step-2"
    assert newest_verified(tmp_path).path.name == "1000000-step-2"
    assert write(tmp_path, 3).name == "1000001-step-3"


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"[]", b"{}", b'{"run_id": 7}'])
def test_the_owner_of_a_directory_is_recorded(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    assert run_of(tmp_path) == ""
    for run_id in ("abc", "abc", "def"):
        record_owner(tmp_path, run_id)
        assert run_of(tmp_path) == run_id


def test_only_folders_with_the_name_of_a_checkpoint_are_checkpoints(tmp_path):
    path = write(tmp_path, 40)
    (tmp_path / "000002-step-7").touch()
    assert (step_of(path), belongs_to(path)) == (40, tmp_path)
    for name in ("12345-step-7", "000002-step-", "000002-step-7-old", "step-7"):
        (tmp_path / name).mkdir()
        assert step_of(tmp_path / name) is None
        assert belongs_to(tmp_path / name) == tmp_path / name
    assert belongs_to(tmp_path / "000002-step-7") == tmp_path / "000002-step-7"
    assert checkpoints(tmp_path) == [path]
    path.rename(tmp_path / "kept")
    assert newest_verified(tmp_path) is None


def test_a_damaged_checkpoint_is_skipped_with_a_note(tmp_path):
    paths = [write(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / "a.txt").write_text("tex")
    (paths[1] / "manifest.json").unlink()
    found = newest_verified(tmp_path)
    assert found.path == paths[0]
    assert [note.split(":")[0] for note in found.notes] == [
        "the checkpoint 000003-step-3 is skipped",
        "the checkpoint 000002-step-2 is skipped",
    ]
    (paths[0] / "empty").unlink()
    with pytest.raises(DamagedError, match=r"(?s)000003.*000002.*000001-step-1 is skipped: empty is missing"):
        newest_verified(tmp_path)
    with pytest.raises(DamagedError, match="000002"):
        newest_verified(paths[1])


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    write(tmp_path, 1)

    def fails(folder):
        fill("text")(folder)
        raise OSError("no space left")

    def may_not():
        raise HeldError(" by another")

    with pytest.raises(OSError, match="no space"):
        commit(tmp_path, 2, fails, lambda: None)
    with pytest.raises(HeldError):
        commit(tmp_path, 2, fill("text"), may_not)
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-1"]


def test_a_killed_writer_leaves_no_checkpoint_that_counts_as_complete(tmp_path):
    program = f"""
import os, signal
from pathlib import Path
from adaptive.disk.directory import commit
def fill(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
commit(Path({str(tmp_path)!r}), 1, fill, lambda: None)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=limit(60), check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert (left / "half").exists()
    assert newest_verified(tmp_path) is None
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_complete_checkpoints_are_retained(tmp_path):
    paths = [write(tmp_path, step) for step in range(6)]
    (paths[4] / "manifest.json").unlink()
    (tmp_path / "notes.txt").touch()
    prune(tmp_path, 6)  # more than are complete
    assert len(checkpoints(tmp_path)) == 6
    prune(tmp_path, 2)
    assert checkpoints(tmp_path) == [paths[5], paths[4], paths[3]]
    prune(tmp_path, 1)
    assert checkpoints(tmp_path) == [paths[5]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000006-step-5", "notes.txt"]
