"""Checkpoints of a run on disk: states round-trip, and errors of the disk do not end a run."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import adaptive as ad
import collectives as comm
from adaptive.disk.folders import CheckpointFolders, checkpoints
from adaptive.disk.lock import LOCK
from adaptive.program.stored import table_of
from adaptive.program.writer import Writer
from adaptive.runtime.local_world import LocalWorld
from tests.relaxed import relaxed, relaxed_tx
from tests.speed import limit

from .test_checkpoint import Averaged, Growing, W, averaging, build, counting, course, driver_of, local, plain, state

COVERS = (
    "adaptive/program/run_checkpointer.py",
    "adaptive/program/run_outputs.py",
    "adaptive/program/stored.py",
    "adaptive/program/writer.py",
)


def names(directory):
    return [path.name for path in reversed(checkpoints(directory))]


@pytest.fixture
def patient(monkeypatch):
    """A fast disk: no due checkpoint is skipped because of the previous one."""
    write = Writer.write

    def patient(writer, checkpoint):
        write(writer, checkpoint)
        writer.wait()

    monkeypatch.setattr(Writer, "write", patient)


def run(program, directory, steps, every: Any = 1, keep=3):
    return list(program.run(steps=steps, checkpoint=ad.Checkpoints(directory, every=every, keep=keep)))


# --- what comes back --------------------------------------------------------------------------------------------------


def test_a_run_resumed_from_disk_is_bitwise_equal(tmp_path):
    with build(driver_of(Growing()), state()) as program:
        program.warm_up()
        run(program, tmp_path, 5, every=100)
        course_of_one = course(program, 6)
        end_of_one = plain(program.state)
    with build(driver_of(Growing()), state(), global_batch=7, shares=(5, 2)) as other:
        course(other, 2)
        other.restore(tmp_path)
        assert other.steps == 5
        ((hook_state,),) = [other._parts.hooks.states]
        assert type(hook_state["steps"]) is int
        assert course(other, 6) == course_of_one
        assert jax.tree.all(jax.tree.map(np.array_equal, plain(other.state), end_of_one))


def test_saving_checkpoints_does_not_change_results(tmp_path, patient):
    courses = []
    for kept in (False, True):
        with build(driver_of(Growing()), state()) as program:
            program.warm_up()
            reports = run(program, tmp_path, 8) if kept else list(program.run(steps=8))
            courses.append([(r.step, r.batch_sizes, float(r.metrics["loss"])) for r in reports])
    assert courses[0] == courses[1]


def test_the_fields_of_a_namedtuple_are_not_swapped(tmp_path):
    with build(averaging, Averaged(W, 0 * W)) as program:
        run(program, tmp_path, 2)
        kept = program.state
    with build(averaging, Averaged(W, 0 * W)) as other:
        other.restore(tmp_path)
        assert isinstance(other.state, Averaged)
        assert jax.tree.all(jax.tree.map(np.array_equal, other.state, kept))
        assert not np.array_equal(kept.params, kept.ema)


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
    def driver(state, batch):
        return state, {"y": comm.all_reduce(batch["y"].mean())}

    with build(driver, start) as program:
        run(program, tmp_path, 1)
        kept = program.state
    blank = jax.tree.map(
        lambda a: (
            jax.random.split(jax.random.key(0), 4)
            if a is MANY["keys"]
            else type(a)(0)
            if isinstance(a, bool | int | float)
            else jnp.zeros_like(a)
        ),
        start,
    )
    with build(driver, blank) as other:
        other.restore(tmp_path)
        found = other.state
    assert jax.tree.structure(found) == jax.tree.structure(kept)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(kept), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)  # keys have none
        assert np.array_equal(plain(a), plain(b))


def test_a_flax_train_state_round_trips(tmp_path):
    net, tx = nn.Dense(2), relaxed_tx(optax.adam(1e-2))

    def fresh(seed):
        params = net.init(jax.random.key(seed), np.zeros((1, 3), np.float32))
        return TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    def driver(state, batch):
        def loss_fn(params):
            return jnp.square(state.apply_fn(params, batch["x"])).mean()

        loss, grads = relaxed(jax.value_and_grad(loss_fn))(state.params)
        return state.apply_gradients(grads=comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}

    with build(driver, fresh(0)) as program:
        run(program, tmp_path, 3)
        kept = program.state
    with build(driver, fresh(1)) as other:
        other.restore(tmp_path)
        assert isinstance(other.state, TrainState)
        assert jax.tree.all(jax.tree.map(np.array_equal, other.state, kept))


def test_double_precision_round_trips(tmp_path):
    jax.config.update("jax_enable_x64", True)
    try:
        start = {"x": np.float64(1) / 3, "n": np.int64(2**40)}

        def driver(state, batch):
            return state, {"y": comm.all_reduce(batch["y"].mean())}

        with build(driver, start) as program:
            run(program, tmp_path, 1)
        with build(driver, {"x": np.float64(0), "n": np.int64(0)}) as other:
            other.restore(tmp_path)
            assert (float(other.state["x"]), int(other.state["n"])) == (1 / 3, 2**40)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_nothing_on_the_disk_is_a_pickle(tmp_path, monkeypatch):
    import pickle

    with build(driver_of(Growing()), state()) as program:
        run(program, tmp_path, 2)

    def refused(*args, **kwargs):
        raise AssertionError("something is unpickled")

    with build(driver_of(Growing()), state()) as other:
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(pickle, name, refused)
        kept = ad.Checkpoints(tmp_path).read()
        monkeypatch.undo()
        other.restore(kept)
        assert other.steps == 2


def test_a_checkpoint_that_was_read_can_be_changed(tmp_path):
    with build(driver_of(Growing()), state()) as program:
        run(program, tmp_path, 2)
    kept = ad.Checkpoints(tmp_path).read()
    kept["state"]["w"] = np.array([1, 2, 3], np.float32)
    with build(driver_of(Growing()), state()) as other:
        other.restore(kept)
        assert np.asarray(other.state["w"]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_continues_on_another_number_of_workers(tmp_path, workers):
    with build(driver_of(Growing()), state()) as program:
        run(program, tmp_path, 3)
        kept = plain(program.state)
    with build(driver_of(Growing()), state(), workers=workers) as other:
        other.restore(tmp_path)
        assert (other.steps, len(other.batch_sizes)) == (3, workers)
        assert jax.tree.all(jax.tree.map(np.array_equal, plain(other.state), kept))


def test_local_state_needs_the_same_number_of_workers(tmp_path):
    options = {"per_worker_state": lambda s: s["own"]}
    with build(local, {"own": 0.0, "all": 0.0}, workers=3, **options) as program:
        run(program, tmp_path, 2)
    with build(local, {"own": 0.0, "all": 0.0}, workers=3, **options) as other:
        other.restore(tmp_path)
        assert [float(leaves[-1]) for leaves in other._parts.engine.states] == [2, 4, 6]
    with (
        build(local, {"own": 0.0, "all": 0.0}, workers=2, **options) as fewer,
        pytest.raises(ad.CheckpointError, match=r"local state of 3 workers; this world has 2. Start 3 workers"),
    ):
        fewer.restore(tmp_path)


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (4, [4, 8, 12, 14]),
        ("4 steps", [4, 8, 12, 14]),
        (" 7 step", [7, 14]),
        ("1 epoch", [5, 10, 14]),  # of 24 examples, by 5
        ("0.5 epochs", [3, 5, 8, 10, 12, 14]),
        ("2 epochs", [10, 14]),
        ("30 minutes", [14]),
        ("0.001 epochs", list(range(1, 15))),
    ],
)
def test_how_often(tmp_path, patient, every, steps):
    with build(counting("count"), [0.0]) as program:
        run(program, tmp_path, 14, every=every, keep=100)
    assert [int(name.split("-")[-1]) for name in names(tmp_path)] == steps


def test_minutes(tmp_path, patient, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("adaptive.program.run_checkpointer.time.monotonic", lambda: now[0])
    with build(counting("count"), [0.0]) as program:
        for report in program.run(steps=9, checkpoint=ad.Checkpoints(tmp_path, every="1.5 minutes", keep=9)):
            now[0] += 50 if report.step < 8 else 0
    assert names(tmp_path) == ["000001-step-3", "000002-step-5", "000003-step-7", "000004-step-9"]


def test_the_last_state_is_saved_once(tmp_path):
    with build(counting("count"), [0.0]) as program:
        run(program, tmp_path, 2, every=100)
        run(program, tmp_path, 0, every=100)
        run(program, tmp_path, 2, every=2)
        assert names(tmp_path) == ["000001-step-2", "000002-step-4"]
        for _ in program.run(steps=3, checkpoint=ad.Checkpoints(tmp_path, every=100)):
            break
        assert len(names(tmp_path)) == 2
        assert not (tmp_path / LOCK).exists()


def test_the_newest_checkpoints_are_retained(tmp_path, patient):
    with build(counting("count"), [0.0]) as program:
        run(program, tmp_path, 5, keep=2)
        assert names(tmp_path) == ["000004-step-4", "000005-step-5"]
        program.restore(tmp_path / "000004-step-4")
        run(program, tmp_path, 2, every=2, keep=2)
        assert names(tmp_path) == ["000005-step-5", "000006-step-6"]


@contextmanager
def slow_disk(monkeypatch):
    """A disk whose writes the test releases."""
    ready, write = threading.Event(), CheckpointFolders.write

    def waits(*args):
        assert ready.wait(limit(60))
        write(*args)

    monkeypatch.setattr(CheckpointFolders, "write", waits)
    try:
        yield ready
    finally:
        ready.set()


def test_no_step_waits_for_the_disk(tmp_path, monkeypatch):
    with build(counting("count"), [0.0]) as program, slow_disk(monkeypatch) as ready:
        notes, states = [], []
        for report in program.run(steps=7, checkpoint=ad.Checkpoints(tmp_path, every=2)):
            notes.append(report.notes)
            states.append(float(program.state[0]))
            assert names(tmp_path) == []
            if report.step == 7:
                ready.set()
        assert names(tmp_path) == ["000001-step-2", "000002-step-7"]
        assert [len(n) for n in notes] == [0, 0, 0, 0, 1, 0, 0]
        assert "no checkpoint of step 4: the previous one is still being written" in notes[4][0]
        program.restore(tmp_path / "000001-step-2")  # what was copied is not what the steps have made of it since
        assert float(program.state[0]) == states[1]


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
    """The checkpoint is skipped with a note, or read as it was: some files of orbax are not needed."""
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
            assert note.startswith("the checkpoint 000002-step-4 is skipped: "), note
    assert skipped >= 3
    standing.restore(two)
    assert standing.steps == 4
    assert standing.step().notes == ()


def test_if_no_checkpoint_is_complete_nothing_is_restored(two, standing, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    for path in checkpoints(tmp_path / "run"):
        (path / "run" / "metadata").write_text("{}")
    before = standing.steps
    for missing_ok in (False, True):
        with pytest.raises(ad.CheckpointError, match=r"(?s)no checkpoint in .*run can be read.*step-4.*step-2 is skip"):
            standing.restore(tmp_path / "run", missing_ok=missing_ok)
    assert standing.steps == before


@pytest.mark.parametrize(
    "make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.touch()], ids=["none", "empty", "file"]
)
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
    for name in ("program.json", "manifest.json"):
        (folder / name).write_text("{}")
    with pytest.raises(ad.CheckpointError, match=r"earlier format. The last commit .* is 6204c98a: restore it"):
        ad.Checkpoints(tmp_path).read()


def test_the_newest_is_the_last_written_whatever_its_step(tmp_path):
    for step in (10, 400, 20):
        writer = CheckpointFolders(tmp_path, 9)
        writer.write(step, *table_of({"state": np.ones(2), "slots": {}, "hooks": {}, "step": step}))
        writer.close()
    assert names(tmp_path) == ["000001-step-10", "000002-step-400", "000003-step-20"]
    assert ad.Checkpoints(tmp_path).read()["step"] == 20
    (tmp_path / "000003-step-20").rename(tmp_path / "1000000-step-20")
    assert checkpoints(tmp_path)[0].name == "1000000-step-20"


def test_a_checkpoint_is_saved_although_older_ones_cannot_be_deleted(tmp_path, patient, monkeypatch, caplog):
    def fails(*args):
        raise OSError("busy")

    with build(counting("count"), [0.0]) as program:
        run(program, tmp_path, 1, keep=1)
        monkeypatch.setattr("orbax.checkpoint._src.path.deleter.StandardCheckpointDeleter.delete_steps", fails)
        reports = run(program, tmp_path, 2, keep=1)
        assert [report.notes for report in reports] == [(), ()]
        assert "is complete, but older ones could not be deleted: busy" in caplog.text
        monkeypatch.undo()
        run(program, tmp_path, 1, keep=1)
    assert names(tmp_path) == ["000004-step-4"]


# --- bad input --------------------------------------------------------------------------------------------------------


NOT_HOW_OFTEN = [0, -1, 2.5, True, None, "", "epoch", "0 epochs", "-1 epoch", "1.5 steps", "1 fortnight", "nan epochs"]
NOT_HOW_OFTEN += [
    "auto",
    "continuous",
    "1e3 steps",
    "every epoch",
    [1],
    float("nan"),
    float("inf"),
    "0.0 minutes",
    "1 epoch 2",
]


@pytest.mark.parametrize("every", NOT_HOW_OFTEN)
def test_invalid_intervals_are_refused(every):
    with pytest.raises(ad.CheckpointError, match=r'is not an interval.*"1 epoch"'):
        ad.Checkpoints("run/", every=every)


@pytest.mark.parametrize("keep", [0, -1, 1.5, None, "3", True, float("inf")])
def test_keeping_none(keep):
    with pytest.raises(ad.CheckpointError, match=r"keep=.* at least 1"):
        ad.Checkpoints("run/", keep=keep)


@pytest.mark.parametrize("directory", ["", None, 3, b"run", "a\0b"])
def test_a_directory_that_is_no_path(directory):
    with pytest.raises(ad.CheckpointError, match="must be a path"):
        ad.Checkpoints(directory)


def first_step_is_not_taken(program, checkpoint, match):
    before = program.steps
    with pytest.raises(ad.CheckpointError, match=match):
        list(program.run(steps=1, checkpoint=checkpoint))
    assert program.steps == before


@pytest.mark.parametrize("checkpoint", ["run/", 3, True])
def test_checkpoint_must_be_a_checkpoints_object(standing, checkpoint):
    first_step_is_not_taken(standing, checkpoint, r"checkpoint= must be an ad\.Checkpoints")


def test_a_directory_that_cannot_be_written(standing, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/no/such"):
        first_step_is_not_taken(standing, ad.Checkpoints(path), r"no checkpoints can be written to .*: \w+")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_read_only(standing, tmp_path):
    tmp_path.chmod(0o500)
    first_step_is_not_taken(standing, ad.Checkpoints(tmp_path), "Permission denied")


def test_a_directory_of_another_driver(two, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    kept = inside(tmp_path / "run")
    with build(counting("other"), {"a": 0.0}) as program:
        with pytest.raises(ad.CheckpointError, match=r"of another program: it has no state\['a'\]"):
            program.restore(tmp_path / "run")
        match = r"holds checkpoints of another run, the newest 000002-step-4.*program\.restore\(.*missing_ok=True"
        first_step_is_not_taken(program, ad.Checkpoints(tmp_path / "run"), match)
    assert inside(tmp_path / "run") == kept


def test_a_directory_that_another_job_writes_to(tmp_path):
    script = f"""
import numpy as np, adaptive as ad, sys
def driver(state, batch):
    return state, {{}}
with ad.Program(driver, 0.0, {{"x": np.ones(8)}}, global_batch=1) as program:
    for report in program.run(checkpoint=ad.Checkpoints({str(tmp_path)!r}, every=1)):
        if report.step == 3:
            program._parts.run.checkpointer.wait()
            print("three", flush=True)
            sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "three\n"
        with build(counting("count"), [0.0]) as program:
            program.restore(tmp_path / "no such", missing_ok=True)
            match = f"is being written by process {other.pid} on .*since.*a separate directory"
            first_step_is_not_taken(program, ad.Checkpoints(tmp_path), match)
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate(timeout=limit(60))
    assert (tmp_path / LOCK).exists()

    def driver(state, batch):
        return state, {}

    with ad.Program(driver, 0.0, {"x": np.ones(8)}, global_batch=1) as program:
        program.restore(tmp_path)  # the dead writer's lock is taken over, and what it left half done is cleared away
        before = program.steps
        run(program, tmp_path, 1)
        assert names(tmp_path)[-1].endswith(f"step-{before + 1}")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("0")] == ["run.json"]


def test_two_runs_of_one_process_do_not_share_a_directory(tmp_path):
    with build(counting("count"), [0.0]) as one, build(counting("count"), [0.0]) as other:
        for _ in one.run(steps=1, checkpoint=ad.Checkpoints(tmp_path)):
            first_step_is_not_taken(other, ad.Checkpoints(tmp_path), rf"is being written by process {os.getpid()} on ")


def test_a_state_of_a_hook_that_is_not_stored_is_named():
    table = {"state": [], "slots": {}, "hooks": {"0/own": {"rng": np.random.default_rng(0)}}, "step": 1}
    with pytest.raises(ad.CheckpointError, match=r"hooks\['0/own'\]\['rng'\] is a Generator, which cannot be stored"):
        table_of(table)
    table["hooks"] = {"0/own": np.array(["a"])}
    with pytest.raises(ad.CheckpointError, match="is an array of <U1, which cannot be stored"):
        table_of(table)


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


def large_state(state, batch):
    return state + comm.all_reduce(batch["y"].mean()), {}


def test_a_full_disk_is_noted_and_the_run_continues(tmp_path, patient, caplog):
    with build(large_state, np.zeros(10_000, np.float32)) as program:
        run(program, tmp_path, 2)
        with full_disk():
            reports = run(program, tmp_path, 3)
        assert [len(r.notes) for r in reports] == [0, 1, 1]
        assert f"no checkpoint of step 3 in {tmp_path}: " in reports[1].notes[0]
        assert names(tmp_path) == ["000001-step-1", "000002-step-2"]
        there = sorted(path.name for path in tmp_path.iterdir())
        assert there == [*names(tmp_path), "run.json"]  # the room is given back
        reports = run(program, tmp_path, 1)
        assert len(reports[0].notes) >= 1  # of the last one, which nobody had heard of yet
        assert names(tmp_path)[-1] == "000003-step-6"
        program.restore(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_warned_of_once(tmp_path, patient, caplog):
    """Of many arrays: the libraries below write them side by side, and each would log what has become of it."""
    many = {f"w{i:02}": np.zeros(20_000, np.float32) for i in range(20)}
    with build(lambda s, b: ({k: v + comm.all_reduce(b["y"].mean()) for k, v in s.items()}, {}), many) as program:
        program.warm_up()
        program.step()
        with full_disk():
            run(program, tmp_path, 1)
        said = f"no checkpoint of step 2 in {tmp_path}: File too large"
        assert [r.getMessage() for r in caplog.records] == [said] * 2  # when it was due, and once more at the end
        run(program, tmp_path, 1)
        program.restore(tmp_path)


def test_a_directory_that_goes_away_is_noted_and_made_again(tmp_path, patient):
    directory = tmp_path / "run"
    with build(counting("count"), [0.0]) as program:
        for report in program.run(steps=4, checkpoint=ad.Checkpoints(directory, every=1)):
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
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize(("every", "epochs"), [("0.5 epochs", 0.5), ("1 epoch", 1), ("2 epochs", 2), ("3 epochs", 3)])
def test_one_is_due_whenever_so_many_epochs_are_over(every, epochs):
    interval, examples = ad.Checkpoints("run/", every=every).interval, 10
    consumed = [0, *np.cumsum(np.random.default_rng(0).integers(1, 5, 60)).tolist()]  # unlike batch sizes
    due = [interval.due(step, consumed[step - 1], consumed[step], examples) for step in range(1, 61)]
    ends = {int(total // (epochs * examples)) for total in consumed} - {0}
    assert sum(due) == len(ends)
    assert due[consumed.index(next(c for c in consumed if c >= epochs * examples)) - 1]
    assert not any(interval.due(step, consumed[step - 1], consumed[step], None) for step in range(1, 61))
