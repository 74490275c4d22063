"""Folders that are whole or are not, directories of them, and who may write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from adaptive.disk import arrays
from adaptive.disk.directory import checkpoints, commit, newest_verified, prune, sweep
from adaptive.disk.lock import LOCK, HeldError, Lock
from adaptive.disk.manifest import DamagedError, verify
from tests.speed import limit

BEAT = 0.02  # seconds


def fill(text):
    def write(folder):
        (folder / "deep").mkdir()
        (folder / "a.txt").write_text(text)
        (folder / "deep" / "b.bin").write_bytes(bytes(range(256)) * 9000)
        (folder / "empty").touch()

    return write


def write(directory, step, text="text"):
    return commit(directory, step, fill(text), lambda: None)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- whole ------------------------------------------------------------------------------------------------------------


def test_a_seal_tells_folders_apart_and_is_the_same_for_the_same(tmp_path):
    one, same, other = (write(tmp_path, 1, text) for text in ("text", "text", "tex_"))
    assert verify(one) == verify(same) != verify(other)


def test_a_folder_without_a_seal_was_never_finished(tmp_path):
    fill("text")(tmp_path)
    with pytest.raises(DamagedError, match=r"manifest\.json, which is written last, is missing"):
        verify(tmp_path)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_any_byte_that_has_changed_is_found(tmp_path, number, where):
    folder = write(tmp_path, 1)
    path = [path for path in files(folder) if path.stat().st_size][number % 3]
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1 << (number * 2)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=f"{path.name} has other contents"):
        verify(folder)


@pytest.mark.parametrize("number", range(4))
def test_any_file_that_is_missing_or_cut_is_found(tmp_path, number):
    folder = write(tmp_path, 1)
    path = files(folder)[number]
    if path.stat().st_size:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(DamagedError, match=path.name):
            verify(folder)
    path.unlink()
    with pytest.raises(DamagedError, match=f"{path.name}.* is missing"):
        verify(folder)


def test_a_file_that_cannot_be_read_is_damage(tmp_path):
    folder = write(tmp_path, 1)
    (folder / "a.txt").unlink()
    (folder / "a.txt").mkdir()
    with pytest.raises(DamagedError, match=r"a\.txt"):
        verify(folder)


# --- directories ------------------------------------------------------------------------------------------------------


def test_the_newest_is_what_was_written_last(tmp_path):
    assert newest_verified(tmp_path) is None
    assert newest_verified(tmp_path / "no such") is None
    paths = [write(tmp_path, step) for step in (10, 400, 20)]
    assert [path.name for path in paths] == ["000001-step-10", "000002-step-400", "000003-step-20"]
    assert newest_verified(tmp_path).path == paths[-1]
    assert newest_verified(paths[1]).path == paths[1]


def test_numbers_go_on_beyond_six_digits(tmp_path):
    write(tmp_path, 1).rename(tmp_path / "999999-step-1")
    assert write(tmp_path, 2).name == "1000000-step-2"
    assert newest_verified(tmp_path).path.name == "1000000-step-2"
    assert write(tmp_path, 3).name == "1000001-step-3"


def test_what_is_damaged_is_passed_over_with_a_note(tmp_path):
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


def test_a_writer_that_is_killed_leaves_nothing_that_is_taken_for_whole(tmp_path):
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


def test_the_newest_that_are_finished_are_kept(tmp_path):
    paths = [write(tmp_path, step) for step in range(6)]
    (paths[4] / "manifest.json").unlink()
    (tmp_path / "notes.txt").touch()
    prune(tmp_path, 2)
    assert checkpoints(tmp_path) == [paths[5], paths[4], paths[3]]
    prune(tmp_path, 1)
    assert checkpoints(tmp_path) == [paths[5]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000006-step-5", "notes.txt"]


# --- arrays -----------------------------------------------------------------------------------------------------------


DTYPES = ["bool", "int4", "int8", "uint16", "int64", "uint64", "float16", "bfloat16", "float8_e4m3fn", "float32"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "complex64", "complex128"])
def test_arrays_come_back_as_they_were(tmp_path, dtype):
    import jax.numpy as jnp

    values = np.arange(6).astype(jnp.dtype(dtype))
    given = {"00000": values, "00001": values.reshape(2, 3), "00002": values[1], "00003": values[2:3].reshape(())}
    arrays.write({name: np.asarray(value) for name, value in given.items()}, tmp_path / "arrays")
    found = arrays.read(tmp_path / "arrays")
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].tobytes() == value.tobytes()


# --- the lock ---------------------------------------------------------------------------------------------------------


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def test_one_writer_at_a_time(tmp_path):
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire()
    assert first.held
    with pytest.raises(HeldError, match="by this process, since 20"):
        second.acquire()
    assert first.held
    assert not second.held
    first.release()
    second.acquire()
    assert second.held
    first.release()  # it is not his any more
    assert second.held
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_another_process_that_lives_is_named(tmp_path):
    program = f"""
import sys
from pathlib import Path
from adaptive.disk.lock import Lock
lock = Lock(Path({str(tmp_path)!r}))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(HeldError, match=f" by process {other.pid} on .*, since 20"):
        Lock(tmp_path).acquire()
    other.kill()
    other.communicate(timeout=limit(60))
    mine = Lock(tmp_path, beat=3600)  # nothing is waited for: it can be seen that the owner is dead
    mine.acquire()
    assert mine.held
    mine.release()


def test_an_owner_on_another_host_lives_as_long_as_it_beats(tmp_path, caplog, monkeypatch):
    owner, other = Lock(tmp_path, beat=BEAT), Lock(tmp_path, beat=10 * BEAT)
    with monkeypatch.context() as patch:
        patch.setattr("adaptive.disk.lock._place", lambda: ["elsewhere"])
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        owner.acquire()
    with pytest.raises(HeldError, match=f" by process {os.getpid()} on elsewhere"):
        other.acquire()
    assert "looking for" in caplog.text
    owner._over.set()  # it beats no more
    other.acquire()
    assert other.held
    assert not owner.held
    with pytest.raises(HeldError, match="by this process"):
        owner.check()
    owner._write(7)  # woken up again, it does not hit the other's lock
    assert other.held
    other.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
def test_a_lock_that_says_nothing_is_taken_over_when_nobody_mends_it(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    mine = Lock(tmp_path, beat=BEAT)
    mine.acquire()
    assert mine.held
    mine.release()


def test_where_files_have_one_name_only(tmp_path, monkeypatch):
    def no_links(source, target):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    test_one_writer_at_a_time(tmp_path)


def test_of_many_who_find_a_dead_owner_one_takes_its_place(tmp_path):
    dead = Lock(tmp_path)
    dead.acquire()
    edit(tmp_path / LOCK, born=0.0)
    locks, start = [Lock(tmp_path) for _ in range(8)], threading.Barrier(8)
    taken = []

    def take(lock):
        start.wait()
        try:
            lock.acquire()
            taken.append(lock)
        except HeldError:
            pass

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(taken) == 1
    assert [lock.held for lock in locks].count(True) == 1
    taken[0].release()
    assert list(tmp_path.iterdir()) == []
