"""Checkpoints of a run on disk: states round-trip, and errors of the disk and killed writers do no harm."""

from __future__ import annotations

import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.disk import folders, writing
from adaptive.disk.folders import checkpoints
from adaptive.disk.lock import LOCK, acquire, release
from adaptive.program.run_checkpointer import RunCheckpointer
from adaptive.runtime.local_world import LocalWorld
from tests.speed import limit

from .test_checkpoint import Growing, build, counting, driver_of, plain, state


def names(directory):
    return [path.name for path in reversed(checkpoints(directory))]


@pytest.fixture
def patient(monkeypatch):
    """A fast disk: no due checkpoint is skipped because of the previous one."""
    write = RunCheckpointer._write
    monkeypatch.setattr(RunCheckpointer, "_write", lambda self, checkpoint: (write(self, checkpoint), self.wait()))


@pytest.fixture(scope="module")
def shared():
    with build(counting("count"), [0.0]) as program:
        yield program, program.checkpoint()


@pytest.fixture
def counter(shared):
    """A program that has taken no step."""
    program, first = shared
    program.restore(first)
    return program


def run(program, directory, steps, every: Any = 1, keep=3):
    return list(program.run(steps=steps, checkpoint=ad.Checkpoints(directory, every=every, keep=keep)))


# --- what comes back --------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    second: Any
    first: Any


MANY = {
    "nested": [{"b": jnp.arange(3), "a": (jnp.ones((2, 2)), [jnp.zeros(())])}, {}],
    "fields": Pair(Pair(jnp.zeros(2), None), jnp.ones(2)),
    "numbers": {10: np.full(2, 10, np.float32), 9: np.full(2, 9, np.float32)},
    "a/b.c['d']": jnp.float32(0.5),
    "": jnp.float32(0.25),
    "half": jnp.arange(5, dtype=jnp.bfloat16),
    "keys": jax.random.split(jax.random.key(3), 4),
    "old key": jax.random.PRNGKey(1),
    "empty": jnp.zeros((0, 3), jnp.int8),
    "truth": jnp.array([True, False]),
    "int": 3,
    "float": 0.1,
    "bool": True,
    "complex": jnp.complex64(1 + 2j),
}


@pytest.mark.parametrize("start", [MANY, jnp.float32(7), {}], ids=["many", "one", "none"])
def test_any_state_round_trips(tmp_path, start):
    def blank(leaf):
        if leaf is MANY["keys"]:
            return jax.random.split(jax.random.key(0), 4)
        return type(leaf)(0) if isinstance(leaf, bool | int | float) else jnp.zeros_like(leaf)

    def driver(state, batch):
        return state, {"y": comm.all_reduce(batch["y"].mean())}

    with build(driver, start) as program:
        run(program, tmp_path, 1)
        kept = program.state
    with build(driver, jax.tree.map(blank, start)) as other:
        other.restore(tmp_path)
        found = other.state
    assert jax.tree.structure(found) == jax.tree.structure(kept)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(kept), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)  # keys have none
        assert np.array_equal(plain(a), plain(b))


def test_nothing_on_the_disk_is_a_pickle_and_what_was_read_can_be_changed(tmp_path, monkeypatch):
    with build(driver_of(Growing()), state()) as program:
        run(program, tmp_path, 2)
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(pickle, name, None)  # an error, if it is called
        kept = ad.Checkpoints(tmp_path).read()
        monkeypatch.undo()
        kept["state"]["w"] = np.array([1, 2, 3], np.float32)
        program.restore(kept)
        assert np.asarray(program.state["w"]).tolist() == [1, 2, 3]


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (" 4 step", [4, 8, 12, 14]),
        ("0.5 epochs", [3, 5, 8, 10, 12, 14]),  # of 24 examples, by 5
        ("2 epochs", [10, 14]),
        ("30 minutes", [14]),
    ],
)
def test_how_often(counter, tmp_path, patient, every, steps):
    run(counter, tmp_path, 14, every=every, keep=100)
    assert [int(name.split("-")[-1]) for name in names(tmp_path)] == steps


def test_minutes(counter, tmp_path, patient, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("adaptive.program.run_checkpointer.time.monotonic", lambda: now[0])
    for report in counter.run(steps=9, checkpoint=ad.Checkpoints(tmp_path, every="1.5 minutes", keep=9)):
        now[0] += 50 if report.step < 8 else 0
    assert names(tmp_path) == ["000001-step-3", "000002-step-5", "000003-step-7", "000004-step-9"]


def test_the_last_state_is_saved_once(counter, tmp_path):
    run(counter, tmp_path, 2, every=100)
    run(counter, tmp_path, 0, every=100)
    run(counter, tmp_path, 2, every=2)
    assert names(tmp_path) == ["000001-step-2", "000002-step-4"]
    for _ in counter.run(steps=3, checkpoint=ad.Checkpoints(tmp_path, every=100)):
        break
    assert len(names(tmp_path)) == 2


def test_the_last_state_is_saved_if_an_earlier_restore_led_to_the_same_step(counter, tmp_path):
    begun = counter.checkpoint()
    for report in counter.run(checkpoint=ad.Checkpoints(tmp_path, every=100, keep_best=("val", "min"))):
        if report.step == 2 and not names(tmp_path):
            counter.log(val=1)
            counter.save()
            counter.restore({**begun, "state": [np.float32(8.0)]})
        elif report.step == 2:
            counter.stop()
    assert names(tmp_path) == ["000001-step-2", "000002-step-2"]
    assert [path.parent.name for path in tmp_path.glob("*/values.json")] == ["000001-step-2"]
    assert float(ad.Checkpoints(tmp_path).read()["state"]["0"]) == float(counter.state[0]) > 8


def test_the_newest_checkpoints_are_retained(counter, tmp_path, patient):
    run(counter, tmp_path, 5, keep=2)
    assert names(tmp_path) == ["000004-step-4", "000005-step-5"]
    counter.restore(tmp_path / "000004-step-4")
    run(counter, tmp_path, 2, every=2, keep=2)
    assert names(tmp_path) == ["000005-step-5", "000006-step-6"]


@contextmanager
def slow_disk(monkeypatch):
    """A disk whose writes the test releases."""
    ready, write = threading.Event(), writing.write

    def waits(*args):
        assert ready.wait(limit(60))
        return write(*args)

    monkeypatch.setattr(writing, "write", waits)
    try:
        yield ready
    finally:
        ready.set()


def test_no_step_waits_for_the_disk(counter, tmp_path, monkeypatch):
    with slow_disk(monkeypatch) as ready:
        notes, states = [], []
        for report in counter.run(steps=7, checkpoint=ad.Checkpoints(tmp_path, every=2)):
            notes.append(report.notes)
            states.append(float(counter.state[0]))
            assert names(tmp_path) == []
            if report.step == 7:
                ready.set()
        assert names(tmp_path) == ["000001-step-2", "000002-step-7"]
        assert [len(n) for n in notes] == [0, 0, 0, 0, 1, 0, 0]
        assert "no checkpoint of step 4: the previous one is still being written" in notes[4][0]
        counter.restore(tmp_path / "000001-step-2")  # what was copied is not what the steps have made of it since
        assert float(counter.state[0]) == states[1]


def test_no_note_says_that_the_last_step_is_not_saved(counter, tmp_path, monkeypatch, caplog):
    with slow_disk(monkeypatch) as ready:
        for report in counter.run(steps=2, checkpoint=ad.Checkpoints(tmp_path, every=1)):
            if report.step == 2:
                ready.set()
    assert names(tmp_path) == ["000001-step-1", "000002-step-2"]
    assert caplog.text == ""


def test_save_writes_a_checkpoint_at_once(counter, tmp_path, monkeypatch):
    with pytest.raises(
        ad.CheckpointError, match=r"save\(\) needs a run with checkpoints(?s:.*)program\.checkpoint\(\)"
    ):
        counter.save()
    with slow_disk(monkeypatch) as ready:
        for report in counter.run(steps=9, checkpoint=ad.Checkpoints(tmp_path, every=2)):
            if report.step == 3:  # waits for the checkpoint that is being written
                threading.Timer(0.1, ready.set).start()
                counter.save()
                assert names(tmp_path) == ["000001-step-2", "000002-step-3"]
                counter.save()  # something other than the step may have changed
                assert names(tmp_path)[-1] == "000003-step-3"
            if report.step == 5:
                counter.save()
                break
    assert [name[7:] for name in names(tmp_path)][-2:] == ["step-4", "step-5"]
    counter.restore(tmp_path)
    assert counter.steps == 5


# --- the best ---------------------------------------------------------------------------------------------------------


def test_the_best_is_kept_across_restarts(counter, tmp_path, patient):
    losses = [5.0, 1.0, 4.0, np.nan, 2.0, 1.0]
    best = ad.Checkpoints(tmp_path, every=1, keep=1, keep_best=("val.loss", "min"))

    def train(program):
        for report in program.run(steps=3, checkpoint=best):
            program.log(val={"loss": losses[report.step - 1], "other": -report.step})

    train(counter)
    assert names(tmp_path) == ["000002-step-2", "000003-step-3"]
    with build(counting("count"), [0.0]) as other:
        other.restore(tmp_path)
        train(other)
        assert names(tmp_path) == ["000002-step-2", "000006-step-6"]
        other.restore(best.best())
        assert other.steps == 2


def test_a_value_that_is_logged_while_its_checkpoint_is_written_or_after_the_run(counter, tmp_path, monkeypatch):
    best = ad.Checkpoints(tmp_path, every=1, keep_best=("val", "min"))
    with slow_disk(monkeypatch) as ready:
        for report in counter.run(steps=2, checkpoint=best):
            if report.step == 1:
                counter.log(val=1.0)
            else:
                ready.set()
    assert best.best().name == "000001-step-1"
    counter.log(val=0.5)
    assert best.best().name == "000002-step-2"


def test_the_best_by_a_metric_of_the_driver(tmp_path, patient):
    def driver(state, batch):
        return state, {"of": {"y": comm.all_reduce(batch["y"].mean())}}

    best = ad.Checkpoints(tmp_path, every=1, keep=1, keep_best=("of.y", "max"))
    with build(driver, 0.0) as program:
        found = [float(report.metrics["of"]["y"]) for report in program.run(steps=4, checkpoint=best)]
    assert best.best().name.endswith(f"step-{1 + np.argmax(found)}")


def test_checkpoints_without_a_value_are_noted_once_and_not_compared(counter, tmp_path, patient):
    best = ad.Checkpoints(tmp_path, every=1, keep=9, keep_best=("val", "min"))
    notes = [note for report in counter.run(steps=5, checkpoint=best) for note in report.notes]
    assert sum("keep_best=('val', 'min'): the value was not logged" in note for note in notes) == 1
    for wrong, match in ((best, "has a value 'val'. It is logged"), (ad.Checkpoints(tmp_path), "best.. needs")):
        with pytest.raises(ad.CheckpointError, match=match):
            wrong.best()


# --- what is damaged --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory with the checkpoints of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("two") / "run"
    with build(counting("count"), [5.0, 6.0]) as program:
        run(program, directory, 2, every=2)
        run(program, directory, 2, every=2)
    return directory


@pytest.fixture(scope="module")
def standing():
    with build(counting("count"), [0.0, 0.0]) as program:
        yield program


def inside(path):
    return sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("harm", ["cut", "delete"])
def test_a_file_that_is_gone_or_cut_does_no_harm(two, standing, tmp_path, harm):
    files, skipped, states = inside(two / "000002-step-4"), 0, {}
    for folder in checkpoints(two):
        standing.restore(folder)
        states[standing.steps] = np.array(standing.state)
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(two, copy)
        path = copy / "000002-step-4" / file
        if harm == "delete":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        standing.restore(copy)
        assert np.array_equal(standing.state, states[standing.steps])
        if standing.steps == 2:
            skipped += 1
            (note,) = standing.step().notes
            assert note.startswith(f"the checkpoint 000002-step-4 is skipped: {copy}/000002-step-4 "), note
    assert skipped >= 2
    standing.restore(two)
    assert standing.steps == 4
    assert standing.step().notes == ()


def test_if_no_checkpoint_is_complete_nothing_is_restored(two, standing, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    for path in checkpoints(tmp_path / "run"):
        (path / "state" / "arrays.npy").write_bytes(b"")
    before = standing.steps
    for missing_ok in (False, True):
        with pytest.raises(ad.CheckpointError, match=r"(?s)no checkpoint in .*run can be read.*step-4.*step-2 is skip"):
            standing.restore(tmp_path / "run", missing_ok=missing_ok)
    assert standing.steps == before


@pytest.mark.parametrize("make", [lambda p: None, Path.mkdir, Path.touch], ids=["none", "empty", "file"])
def test_where_there_is_none_at_all(standing, tmp_path, make):
    make(tmp_path / "run")
    before = standing.steps
    with pytest.raises(ad.CheckpointError, match=r"there is nothing to restore: .*run .*missing_ok=True"):
        standing.restore(tmp_path / "run")
    standing.restore(tmp_path / "run", missing_ok=True)
    assert standing.steps == before


def test_a_checkpoint_of_an_earlier_format_names_the_commit_that_reads_it(tmp_path):
    folder = tmp_path / "000001-step-2"
    folder.mkdir()
    (folder / "program.json").write_text("{}")
    with pytest.raises(ad.CheckpointError, match=r"earlier format. The last commit .* is 6204c98a: restore it"):
        ad.Checkpoints(tmp_path).read()


def test_a_checkpoint_gets_its_name_when_it_is_complete(tmp_path, monkeypatch):
    save, seen = np.save, []
    monkeypatch.setattr(np, "save", lambda *given, **how: (seen.append(names(tmp_path)), save(*given, **how)))
    writing.write(tmp_path, 9, 7, folders.arrays_of({"state": np.ones(2), "step": 7}))
    assert seen == [[], []]
    assert names(tmp_path) == ["000001-step-7"]


def test_the_newest_is_the_last_written_whatever_its_step(tmp_path):
    for step in (10, 400, 20):
        writing.write(tmp_path, 9, step, folders.arrays_of({"state": np.ones(2), "step": step}))
    assert names(tmp_path) == ["000001-step-10", "000002-step-400", "000003-step-20"]
    assert ad.Checkpoints(tmp_path).read()["step"] == 20
    (tmp_path / "000002-step-400").rename(tmp_path / "999999-step-400")
    (tmp_path / "000003-step-20").rename(tmp_path / "1000000-step-20")
    assert names(tmp_path) == ["000001-step-10", "999999-step-400", "1000000-step-20"]


def test_a_checkpoint_is_saved_although_older_ones_cannot_be_deleted(counter, tmp_path, patient, monkeypatch, caplog):
    def fails(*args):
        raise OSError("busy")

    run(counter, tmp_path, 1, keep=1)
    monkeypatch.setattr("orbax.checkpoint._src.path.deleter.StandardCheckpointDeleter.delete_steps", fails)
    reports = run(counter, tmp_path, 2, keep=1)
    assert [report.notes for report in reports] == [(), ()]
    assert "is complete, but old ones cannot be deleted: busy" in caplog.text
    monkeypatch.undo()
    run(counter, tmp_path, 1, keep=1)
    assert names(tmp_path) == ["000004-step-4"]


# --- while a run writes to it -----------------------------------------------------------------------------------------


def finishes_a_newer_one(run):
    """What a writer does that keeps one checkpoint: a new one is finished, and all others are deleted."""
    path, *older = checkpoints(run)
    shutil.copytree(path, run / ".unfinished-3")
    (run / ".unfinished-3").rename(run / "000003-step-4")
    for each in [path, *older]:
        shutil.rmtree(each.rename(run / f".unfinished-{each.name}"))


@pytest.fixture
def live(two, tmp_path, monkeypatch):
    """A copy of `two`, and a function that has the first reading of a checkpoint begin with something else."""
    shutil.copytree(two, tmp_path / "run")
    read, first = folders.read, []

    def begin_with(work):
        first.append(work)
        monkeypatch.setattr(folders, "read", lambda path: (first and first.pop()(tmp_path / "run"), read(path))[1])

    return tmp_path / "run", begin_with


@pytest.mark.parametrize("how", ["read", "restore"])
def test_where_the_writer_deletes_a_checkpoint_the_newer_one_is_read(live, standing, how):
    run, begin_with = live
    begin_with(finishes_a_newer_one)
    standing.restore(ad.Checkpoints(run).read() if how == "read" else run)
    assert standing.steps == 4
    assert names(run) == ["000003-step-4"]
    begin_with(lambda run: [shutil.rmtree(path) for path in checkpoints(run)])
    with pytest.raises(ad.CheckpointError, match="holds no checkpoint"):
        ad.Checkpoints(run).read() if how == "read" else standing.restore(run)


def test_a_named_checkpoint_that_was_deleted_is_an_error(live, standing):
    run, begin_with = live
    begin_with(finishes_a_newer_one)
    with pytest.raises(ad.CheckpointError, match="000001-step-2 does not exist"):
        standing.restore(run / "000001-step-2")


# --- bad input --------------------------------------------------------------------------------------------------------


INTERVALS = [0, 2.5, True, None, "", "epoch", "0 epochs", "-1 epoch", "1.5 steps", "1 fortnight", [1]]
INVALID = [({"every": every}, r'is not an interval.*"1 epoch"') for every in INTERVALS]
INVALID += [({"keep": keep}, r"keep=.* at least 1") for keep in (0, 1.5, None)]
BEST = ("val.loss", ("val.loss", "least"), (1, "min"))
INVALID += [({"keep_best": best}, r'keep_best=.*\("val.loss", "min"\)') for best in BEST]


@pytest.mark.parametrize(("argument", "says"), INVALID)
def test_invalid_arguments_are_refused(argument, says):
    with pytest.raises(ad.CheckpointError, match=says):
        ad.Checkpoints("run/", **argument)


def first_step_is_not_taken(program, checkpoint, match):
    before = program.steps
    with pytest.raises(ad.CheckpointError, match=match):
        list(program.run(steps=1, checkpoint=checkpoint))
    assert program.steps == before


def test_a_directory_that_cannot_be_written(standing, tmp_path):
    first_step_is_not_taken(standing, "run/", r"checkpoint= must be an ad\.Checkpoints")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/no/such"):
        first_step_is_not_taken(standing, ad.Checkpoints(path), r"no checkpoints can be written to .*: \w+")


def test_a_directory_of_another_driver(two, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    kept = inside(tmp_path / "run")
    with build(counting("other"), {"a": 0.0}) as program:
        with pytest.raises(ad.CheckpointError, match=r"of another program: it has no state\['a'\]"):
            program.restore(tmp_path / "run")
        match = r"holds checkpoints of another run, the newest 000002-step-4.*program\.restore\(.*missing_ok=True"
        first_step_is_not_taken(program, ad.Checkpoints(tmp_path / "run"), match)
    assert inside(tmp_path / "run") == kept


def test_a_directory_is_the_same_by_a_symbolic_link(counter, tmp_path):
    run(counter, tmp_path / "run", 2, every=1)
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "one").symlink_to(tmp_path / "run" / "000001-step-1")
    with build(counting("count"), [0.0]) as other:
        other.restore(tmp_path / "link")
        run(other, tmp_path / "run", 1)
        other.restore(tmp_path / "one")
        run(other, tmp_path / "link", 1)
        assert other.steps == 2


def test_a_directory_that_another_job_writes_to(standing, tmp_path):
    held = acquire(tmp_path)
    match = r"is being written by process \d+ on .*since.*a separate directory"
    first_step_is_not_taken(standing, ad.Checkpoints(tmp_path), match)
    release(held)


# --- the disk fails ---------------------------------------------------------------------------------------------------


@contextmanager
def full_disk():
    """No file may grow beyond a kilobyte: a write that is really refused, as by a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_noted_and_the_run_continues(tmp_path, patient, caplog):
    with build(counting("count"), np.zeros(10_000, np.float32)) as program:
        run(program, tmp_path, 2)
        with full_disk():
            reports = run(program, tmp_path, 3)
        assert [len(r.notes) for r in reports] == [0, 1, 1]
        assert f"no checkpoint of step 3 in {tmp_path}: " in reports[1].notes[0]
        assert names(tmp_path) == ["000001-step-1", "000002-step-2"]
        reports = run(program, tmp_path, 1)
        assert len(reports[0].notes) >= 1  # of the last one, which nobody had heard of yet
        assert names(tmp_path)[-1] == "000003-step-6"
        assert {path.name for path in tmp_path.iterdir()} == {*names(tmp_path), LOCK}  # the room is given back
        program.restore(tmp_path)


def test_a_directory_that_goes_away_is_noted_and_made_again(counter, tmp_path, patient):
    directory = tmp_path / "run"
    for report in counter.run(steps=4, checkpoint=ad.Checkpoints(directory, every=1)):
        if report.step == 1:
            shutil.rmtree(directory)
            directory.touch()
        if report.step == 2:
            directory.unlink()
        if report.step == 3:
            assert any("no checkpoint of step 2" in note for note in report.notes)
    assert names(directory) == ["000001-step-3", "000002-step-4"]


# --- who writes -------------------------------------------------------------------------------------------------------


class Renumbered(LocalWorld):
    """A process whose rank changes, as when others are lost."""

    rank = 1


def test_the_current_rank_0_writes(tmp_path, patient):
    world = Renumbered(2)
    with build(counting("count"), [0.0], world=world) as program:
        for report in program.run(steps=6, checkpoint=ad.Checkpoints(tmp_path, every=2)):
            assert (tmp_path / LOCK).exists() == (report.step >= 4)
            world.rank = 0 if report.step >= 3 else 1
    assert names(tmp_path) == ["000001-step-4", "000002-step-6"]
    release(acquire(tmp_path))  # it is free


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.long)])
def test_a_writer_that_is_killed_at_any_moment(tmp_path, kills):
    """Of the checkpoints in a run, and of the last one at its end, in turn."""
    moments, newest = np.random.default_rng(kills).uniform(0, 0.6, kills), 0
    script = Path(__file__).with_name("endless_writer.py")
    for number, moment in enumerate(moments):
        every = "1" if number % 2 else "1000000"
        job = subprocess.Popen([sys.executable, script, tmp_path, every], stdout=subprocess.PIPE, text=True)
        try:
            assert job.stdout.readline() == "ready\n"
            time.sleep(moment)
        finally:
            job.kill()
            job.communicate()
        kept = folders.read(checkpoints(tmp_path)[0])  # the newest is complete
        assert kept["step"] > newest
        newest = int(kept["step"])
        assert kept["cursor"] == 4 * newest
        np.testing.assert_array_equal(kept["state"], np.full(1 << 18, newest, np.float32))
    assert newest >= kills
    assert len(checkpoints(tmp_path)) <= 3  # one may have been about to be deleted
