"""A run that is restored, killed or continued elsewhere: each log has the last version of each step."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import adaptive as ad
import collectives as comm
from adaptive.disk import writing
from adaptive.extend import read_run
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data
from tests.adaptive.event_files import events, scalars
from tests.speed import limit

ROOT = Path(__file__).resolve().parents[3]
ID, OTHER = "0123456789ab", "ba9876543210"


@pytest.fixture
def build():
    """Programs whose metric `attempt` is the number of the program."""
    made = []

    def build(world=None):
        attempt = float(len(made) + 1)

        def driver(state, batch):
            return state + comm.all_reduce(batch["y"].mean()), {
                "attempt": comm.all_reduce(0 * batch["y"].mean()) + attempt
            }

        world = world or LocalWorld(2)
        program = ad.Program(driver, 0.0, make_data(24), global_batch=4, world=world, resizable=False)
        made.append(program)
        return program

    yield build
    for program in made:
        program.close()


def rows_of(path):
    """The last row of each step of each run, as `drop_duplicates(["run_id", "step"], keep="last")` gives them."""
    last = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            last.pop(key := (row["run_id"], row["step"]), None)
            last[key] = row
    return list(last.values())


def steps_of(path):
    return [int(row["step"]) for row in rows_of(path)]


def test_the_first_step_after_a_restore_is_marked_for_listeners(build):
    program, seen = build(), []
    program.subscribe(lambda event: seen.append((event.report.step, event.restored, event.run_id)))
    program.step()
    kept = program.checkpoint()
    program.step()
    program.restore(kept)
    program.step()
    program.step()
    ran = program.run_id
    assert (len(ran), build().run_id == ran) == (12, False)
    assert seen == [(1, False, ran), (2, False, ran), (2, True, ran), (3, False, ran)]


@pytest.mark.parametrize("same", [True, False], ids=["same process", "another process"])
def test_each_log_has_the_last_version_of_each_step_once(build, tmp_path, same):
    table, trace, board = tmp_path / "run.csv", tmp_path / "run.jsonl", tmp_path / "board"

    def log():
        return [ad.log.CSV(table), ad.log.JSONL(trace), ad.log.TensorBoard(board)]

    first = build()
    sinks = log()
    list(first.run(steps=4, log=sinks))
    kept = first.checkpoint()
    list(first.run(steps=3, log=sinks))
    if same:
        second, attempt = first, 1.0
    else:
        second, attempt, sinks = build(), 2.0, log()
    second.restore(kept)
    assert second.run_id == first.run_id
    list(second.run(steps=4, log=sinks))
    wanted = [(step, attempt if step > 4 else 1.0) for step in range(1, 9)]
    assert [(int(row["step"]), float(row["attempt"])) for row in rows_of(table)] == wanted
    lines = [fields for _, fields in read_run(trace).steps]
    assert [(line["step"], line["metrics"]["attempt"]) for line in lines] == wanted
    assert [(line["step"], line["repeated"]) for line in lines if line["restores"]] == [(5, 3)]
    assert scalars(board, "attempt") == wanted
    assert second.epoch == 8 * 4 // 24
    assert rows_of(table)[-1]["examples"] == str(8 * 4)


def test_a_checkpoint_is_on_the_disk_only_after_the_logs_hold_its_step(build, tmp_path, monkeypatch):
    table, found, write = tmp_path / "run.csv", [], writing.write

    def looked_at(directory, keep, step, *more):
        found.append((step, steps_of(table)[-1]))
        return write(directory, keep, step, *more)

    monkeypatch.setattr(writing, "write", looked_at)
    program = build()
    for _ in program.run(steps=6, log=[ad.log.CSV(table)], checkpoint=ad.Checkpoints(tmp_path / "kept", every=2)):
        program._parts.run.checkpointer.wait()
    assert found == [(2, 2), (4, 4), (6, 6)]
    for report in program.run(log=[ad.log.CSV(table)]):
        if report.step == 9:
            program.checkpoint()
            assert steps_of(table)[-1] == 9
            break


def write(sink, *steps, run_id=ID, restored=False):
    """Write steps; the first one may be `restored`."""
    for step in steps:
        sink.write(replace(event(step, run_id=run_id), restored=restored and step == steps[0]))
    sink.close()


def test_other_runs_of_a_folder_keep_their_points(tmp_path):
    write(ad.log.TensorBoard(tmp_path), 1, 2, 3, run_id=OTHER)
    write(ad.log.TensorBoard(tmp_path), 2, 3)
    assert not any(entry.HasField("session_log") for entry in events(tmp_path))
    write(ad.log.TensorBoard(tmp_path), 3)
    assert [entry.step for entry in events(tmp_path) if entry.HasField("session_log")] == [3]


# --- Weights & Biases -------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(monkeypatch):
    """The part of wandb that a sink uses; `begun` are its runs."""
    begun = []

    class Run:
        def __init__(self, **init):
            self.init, self.logged, self.finished, self.axes = init, [], 0, {}
            begun.append(self)

        def define_metric(self, name, step_metric):
            self.axes[name] = step_metric

        def log(self, data):
            self.logged.append(data)

        def finish(self):
            self.finished += 1

    module = ModuleType("wandb")
    module.init, module.begun = Run, begun
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_wandb_gets_scalars_and_notes_and_finishes_its_own_run(wandb):
    sink = ad.log.WandB(project="digits")
    assert wandb.begun == []
    sink.write(event(1, notes=["clipped"]))
    sink.write(event(2))
    sink.close()
    (run,) = wandb.begun
    assert (run.init, run.finished) == ({"id": ID, "resume": "allow", "project": "digits"}, 1)
    assert [(data["step"], data["loss"], data.get("notes")) for data in run.logged] == [
        (1, 1.0, "clipped"),
        (2, 2.0, None),
    ]
    assert run.axes.keys() == {name for data in run.logged for name in data} - {"step"}
    assert set(run.axes.values()) == {"step"}
    sink.write(event(3))
    sink.write(replace(event(3, notes=["clipped"]), logged={"val": 0.5}))  # the step's own values are there
    assert wandb.begun[-1].logged[-1] == {"step": 3, "val": 0.5}
    sink.close()
    given = wandb.init()
    sink = ad.log.WandB(given)
    sink.write(event(1))
    sink.close()
    assert (len(wandb.begun), len(given.logged), given.finished) == (3, 1, 0)


def test_wandb_marks_the_first_point_after_a_restore_and_defines_axes_of_each_run(wandb):
    sink = ad.log.WandB()
    write(sink, 4, 5, restored=True)
    write(sink, 6)
    first, second = wandb.begun
    assert [data.get("restored_after") for data in first.logged] == [3, None]
    assert [data.get("restored_after") for data in second.logged] == [None]
    assert second.axes.keys() == first.axes.keys() - {"restored_after"}


@pytest.mark.parametrize(
    ("init", "environ", "passed"),
    [
        ({"id": "mine", "resume": "never"}, {}, {"id": "mine", "resume": "never"}),
        ({}, {"WANDB_RUN_ID": "mine"}, {"id": "mine", "resume": "allow"}),
        ({}, {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, {"id": "mine", "resume": "must"}),
    ],
)
def test_user_settings_of_the_wandb_run_take_precedence(wandb, monkeypatch, init, environ, passed):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    write(ad.log.WandB(**init), 1)
    assert wandb.begun[0].init == passed


@pytest.mark.long
def test_one_run_stays_one_wandb_run_offline(tmp_path):
    """With wandb itself: in two processes, of which one calls `run` twice, and with a restore in place."""
    pytest.importorskip("wandb")
    script = textwrap.dedent(
        """
        import pickle, sys
        from pathlib import Path
        import numpy as np
        import adaptive as ad, collectives as comm
        from adaptive.runtime.local_world import LocalWorld

        def driver(state, batch):
            return state + comm.all_reduce(batch.mean()), {"noise.scale": state}

        folder, kept = Path(sys.argv[1]), Path(sys.argv[1]) / "kept"
        log = [ad.log.WandB(project="prologue", dir=str(folder))]
        program = ad.Program(driver, 0.0, np.ones(8), global_batch=4, world=LocalWorld(2), resizable=False)
        if kept.exists():
            program.restore(pickle.loads(kept.read_bytes()))
            list(program.run(steps=4, log=log))
        else:
            list(program.run(steps=3, log=log))
            kept.write_bytes(pickle.dumps(program.checkpoint()))
            again = True
            for report in program.run(steps=3, log=log):
                if report.step == 5 and again:
                    again = False
                    program.restore(pickle.loads(kept.read_bytes()))
        """
    )
    environ = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    for _ in range(2):
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit(100), env=environ, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "wandb: WARNING" not in done.stderr  # of steps that are dropped
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 3  # `wandb sync` joins those of one id
    assert len({file.name for file in files}) == 1
