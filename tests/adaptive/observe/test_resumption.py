"""A run resumed at an earlier step: a reader of each log finds the last version of each step, once."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.errors import RecordError
from adaptive.disk.folders import CheckpointFolders
from adaptive.html_report.columns import read_columns
from adaptive.html_report.events import run_events
from adaptive.observe import sinks as _sinks
from adaptive.observe.recorded import read_parts, read_run
from adaptive.observe.sinks import Resumption, SinkThread
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data
from tests.adaptive.event_files import events, scalars
from tests.speed import limit

COVERS = ("adaptive/observe/line_file.py", "adaptive/observe/recorded.py", "adaptive/observe/sinks.py")

ROOT = Path(__file__).resolve().parents[3]
ID, OTHER = "0123456789ab", "ba9876543210"


class TerminationNotice:
    """A user's own sink that records its calls in order. Steps are numbers, resumptions tuples."""

    def __init__(self):
        self.calls = []

    def resume(self, resumption):
        self.calls.append(tuple(resumption))

    def write(self, event):
        self.calls.append(event.report.step)

    def close(self):
        pass


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


# --- calls of sinks ---------------------------------------------------------------------------------------------------


def test_a_sink_is_notified_of_the_start_and_resumption_of_a_run(build):
    program, sink = build(), TerminationNotice()
    kept, run_id = program.checkpoint(), program.run_id
    for report in program.run(steps=3, log=[sink]):
        if report.step == 2 and kept:
            program.restore(kept)
            kept = None
    list(program.run(steps=1, log=[sink]))
    begins, restored, again = (0, run_id, False), (0, run_id, True), (3, run_id, False)
    assert sink.calls == [begins, 1, 2, restored, 1, 2, 3, again, 4]


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
    assert seen == [(1, False, ran), (2, False, ran), (2, True, ran), (3, False, ran)]


def test_a_sink_without_resume_gets_all_steps(build):
    class Kept:
        def __init__(self):
            self.steps = []

        def write(self, event):
            self.steps.append(event.report.step)

        def close(self):
            pass

    program, sink = build(), Kept()
    kept = program.checkpoint()
    for report in program.run(steps=2, log=[sink]):
        if report.step == 1 and kept:
            program.restore(kept)
            kept = None
    assert sink.steps == [1, 1, 2]


def test_omitted_steps_do_not_hide_a_resumption(monkeypatch):
    monkeypatch.setattr(_sinks, "INTERVAL", 1000.0)
    monkeypatch.setattr(_sinks, "_MOST_WAITING", 2)
    sink = TerminationNotice()
    thread = SinkThread(sink, LocalWorld(2))
    for step in (1, 2, 3, 4, 2, 3):  # the first is written at once, the next two wait, and the others are left out
        thread(event(step))
    thread.flush()
    thread(event(4))
    thread.close()
    assert sink.calls == [(0, ID, False), 1, 2, 3, (1, ID, False), 4]


class Ranked(LocalWorld):
    """A world in which this process gets another rank, as when others are lost."""

    rank = 1


def test_the_next_rank_0_writes_the_last_steps_again(monkeypatch):
    monkeypatch.setattr(_sinks, "INTERVAL", 1.0)
    clock = [0.0]
    monkeypatch.setattr(_sinks, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: 0.0))
    world, sink = Ranked(2), TerminationNotice()
    thread = SinkThread(sink, world)
    for step in range(1, 10):
        clock[0] += 1.0
        thread(event(step))
    world.rank = 0
    thread(event(10))
    thread.close()
    assert sink.calls == [(5, ID, False), 6, 7, 8, 9, 10]


def test_logs_of_the_next_rank_0_have_each_step_once(build, tmp_path):
    """The one before has written some of the steps."""
    table, trace = tmp_path / "run.csv", tmp_path / "run.jsonl"
    world = Ranked(2)
    program = build(world)
    before = [ad.log.CSV(table), ad.log.JSONL(trace)]  # of the other process

    def write_as_the_other(event):
        if event.report.step <= 4:
            for sink in before:
                sink.write(event)

    program.subscribe(write_as_the_other)
    for report in program.run(steps=8, log=[ad.log.CSV(table), ad.log.JSONL(trace)]):
        if report.step == 5:
            world.rank = 0
    for sink in before:
        sink.close()
    assert steps_of(table) == list(range(1, 9))
    assert [fields["step"] for _, fields in read_run(trace).steps] == list(range(1, 9))
    assert read_columns(trace).restored == ()  # nothing was taken again
    assert len(read_parts(trace)) == 1


# --- in the same process, and in another ------------------------------------------------------------------------------


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
    assert [(m["after"], m["repeated"]) for line in lines for m in line.get("resumed", ())] == [(4, 3)]
    assert scalars(board, "attempt") == wanted
    assert second.epoch == 8 * 4 // 24
    assert rows_of(table)[-1]["examples"] == str(8 * 4)


def test_programs_have_ids_of_their_own(build):
    one, two = build(), build()
    assert one.run_id != two.run_id
    assert [len(program.run_id) for program in (one, two)] == [12, 12]


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_in_its_logs(build, tmp_path):
    table, kept = tmp_path / "run.csv", ad.Checkpoints(tmp_path / "kept", every=100)
    first = build()
    for report in first.run(log=[ad.log.CSV(table)], checkpoint=kept):
        if report.step == 3:
            break
    second = build()
    second.restore(kept, missing_ok=True)
    list(second.run(steps=3, log=[ad.log.CSV(table)], checkpoint=kept))
    assert [(row["step"], row["attempt"]) for row in rows_of(table)] == [("1", "2.0"), ("2", "2.0"), ("3", "2.0")]
    third = build()
    third.restore(tmp_path / "elsewhere", missing_ok=True)
    assert third.run_id not in (first.run_id, second.run_id)


def test_a_checkpoint_is_on_the_disk_only_after_the_logs_hold_its_step(build, tmp_path, monkeypatch):
    monkeypatch.setattr(_sinks, "INTERVAL", 1000.0)
    table, found, write = tmp_path / "run.csv", [], CheckpointFolders.write

    def looked_at(directory, step, *rest):
        found.append((step, steps_of(table)[-1]))
        return write(directory, step, *rest)

    monkeypatch.setattr(CheckpointFolders, "write", looked_at)
    program = build()
    for _ in program.run(steps=6, log=[ad.log.CSV(table)], checkpoint=ad.Checkpoints(tmp_path / "kept", every=2)):
        program._parts.run.checkpointer.wait()
    assert found == [(2, 2), (4, 4), (6, 6)]
    for report in program.run(log=[ad.log.CSV(table)]):
        if report.step == 9:
            program.checkpoint()
            assert steps_of(table)[-1] == 9
            break


def test_a_trace_is_of_as_many_steps_where_the_program_is_restored_meanwhile(build, tmp_path):
    program = build()
    list(program.run(steps=5))
    kept = program.checkpoint()
    program.step()
    program.trace(tmp_path / "trace.json", steps=4)
    program.step()
    program.restore(kept)
    program.step()
    program.step()
    assert not (tmp_path / "trace.json").exists()
    program.step()
    assert (tmp_path / "trace.json").exists()


# --- rows and lines -------------------------------------------------------------------------------------------------


def write(sink, *steps, run_id=ID, after=None, restored=True, **fields):
    """Write steps; the first one is `restored` if the run goes on after a step."""
    if after is not None and hasattr(sink, "resume"):
        sink.resume(Resumption(after, run_id, restored))
    for step in steps:
        first = after is not None and restored and step == steps[0]
        sink.write(replace(event(step, run_id=run_id, **fields), restored=first))
    sink.close()


def test_rows_are_only_added(tmp_path):
    path = tmp_path / "run.csv"
    write(ad.log.CSV(path), 1, 2, 3, run_id=OTHER)
    write(ad.log.CSV(path), 1, 2, 3)
    before = path.read_bytes()
    write(ad.log.CSV(path), 2, after=1)
    assert path.read_bytes().startswith(before)
    assert [(row["run_id"], row["step"]) for row in rows_of(path)] == [
        *[(OTHER, "1"), (OTHER, "2"), (OTHER, "3")],
        *[(ID, "1"), (ID, "3"), (ID, "2")],
    ]


@pytest.mark.parametrize("kind", [ad.log.CSV, ad.log.JSONL])
def test_each_line_is_on_the_disk_when_it_is_written(tmp_path, kind):
    sink = kind(tmp_path / "run")
    for step in (1, 2, 3):
        sink.write(event(step))
        text = (tmp_path / "run").read_text()
        assert text.endswith("\n")
        assert text.count("\n") == 1 + step
    sink.close()


@pytest.mark.parametrize("kind", [ad.log.CSV, ad.log.JSONL])
@pytest.mark.parametrize("cut", [1, 2, 40, 10_000])
def test_a_last_line_that_was_cut_is_removed(tmp_path, kind, cut):
    path = tmp_path / "run"
    write(kind(path), 1, 2, notes=['a "note" – of two\nlines'])
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[: max(len(whole) - cut, last + 5)])
    write(kind(path), 2, 3, after=1)
    assert path.read_bytes().startswith(whole[:last])
    if kind is ad.log.CSV:
        assert steps_of(path) == [1, 2, 3]
    else:
        assert [fields["step"] for _, fields in read_run(path).steps] == [1, 2, 3]


def test_lines_of_a_resumed_run_may_follow_those_of_another_run(tmp_path):
    path = tmp_path / "run.jsonl"
    write(ad.log.JSONL(path), 1, 2, 3)
    write(ad.log.JSONL(path), 1, 2, run_id=OTHER)
    write(ad.log.JSONL(path), 3, 4, after=2)
    runs = [read_run(path, number) for number in (0, 1)]
    assert [run.header["run_id"] for run in runs] == [OTHER, ID]
    assert [[fields["step"] for _, fields in run.steps] for run in runs] == [[1, 2], [1, 2, 3, 4]]
    with pytest.raises(RecordError, match="holds 2 runs; there is no run 2"):
        read_run(path, 2)


def test_a_part_with_another_header_is_a_part_of_its_own(tmp_path):
    path = tmp_path / "run.jsonl"
    write(ad.log.JSONL(path), 1, 2, 3)
    write(ad.log.JSONL(path), 3, 4, 5, after=2, sizes=(2, 1, 1))
    write(ad.log.JSONL(path), 5, 6, after=4, sizes=(2, 1, 1))
    two, three = read_parts(path)
    assert [two.header["workers"], three.header["workers"]] == [2, 3]
    assert [[fields["step"] for _, fields in part.steps] for part in (two, three)] == [[1, 2], [3, 4, 5, 6]]
    columns = read_columns(path)
    assert columns.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert columns.sizes.tolist() == [[2, 2, 0]] * 2 + [[2, 1, 1]] * 4
    write(ad.log.JSONL(path), 2, after=1, sizes=(4,))
    assert [part.header["workers"] for part in read_parts(path)] == [2, 1]  # no part is left without steps


def test_a_reader_counts_the_steps_that_were_discarded_at_each_restore(tmp_path):
    path = tmp_path / "run.jsonl"
    write(ad.log.JSONL(path), *range(1, 8))
    write(ad.log.JSONL(path), 5, 6, after=4)
    write(ad.log.JSONL(path), 5, 6, 7, 8, after=4)
    write(ad.log.JSONL(path), 3, after=2)
    columns = read_columns(path)
    assert columns.step.tolist() == [1, 2, 3]
    assert columns.elapsed[-1] == 1.5  # of three steps
    found = [(each.row, each.after, each.repeated, each.seconds) for each in columns.restored]
    assert found == [(2, 4, 3, 1.5), (2, 4, 2, 1.0), (2, 2, 6, 3.0)]
    (line,) = (change for change in run_events(columns)[0] if change.kind == "restored")
    assert line.what == "Restored 3 times at step 2"
    assert line.why == "11 steps discarded, which had taken 5.5 s"


def lines_of(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_restore_has_the_times_and_the_examples_of_the_discarded_steps(tmp_path):
    path, header = tmp_path / "run.jsonl", {"kind": "header", "version": 4, "run_id": ID}
    origin = {"process": 20.0, "build": 21.0, "built": 22.0, "hosts": ["a"]}
    steps = [
        {
            "kind": "step",
            "step": step,
            "batch_sizes": [4, step],
            "seconds": 0.5,
            "at": 10.0 + step,
            "between": {"script": 0.25},
        }
        for step in range(1, 7)
    ]
    steps[3] |= {"origin": origin, "lost": ["rank 1"], "between": {"script": 1.0, "saving": 2.0}}
    again = {**steps[3], "restored": True}
    other = {**header, "run_id": OTHER}
    lines_of(path, header, *steps[:2], {**header, "workers": 3}, *steps[2:], other, steps[0], header, again)
    first, second, third = read_parts(path)
    assert [fields["step"] for _, fields in first.steps] == [1, 2]
    assert [fields["step"] for _, fields in second.steps] == [3]
    ((_, line),) = third.steps
    assert line["resumed"] == [
        {
            "after": 3,
            "repeated": 3,
            "seconds": 1.5,
            "losses": 1,
            "examples": 12 + 4 + 5 + 6,
            "to": 16.0,
            "between": {"script": 1.5, "saving": 2.0},
            "origins": [{"process": 20.0, "build": 21.0, "built": 22.0, "last": 13.0}],
        }
    ]
    nothing = {"after": 6, "repeated": 0, "seconds": 0, "losses": 0}
    lines_of(path, header, *steps, header, {**steps[0], "step": 7, "restored": True})
    *_, (_, line) = read_run(path).steps
    assert line["resumed"] == [nothing]


def test_lines_that_another_rank_writes_again_are_not_repeated_steps(tmp_path):
    path = tmp_path / "run.jsonl"
    write(ad.log.JSONL(path), 1, 2, 3, 4)
    write(ad.log.JSONL(path), 3, 4, 5)
    assert [(fields["step"], "resumed" in fields) for _, fields in read_run(path).steps] == [
        (step, False) for step in range(1, 6)
    ]


@pytest.mark.parametrize("run", [-3, 2])
def test_runs_are_counted_by_their_ids_and_those_without_are_runs_of_their_own(tmp_path, run):
    path, header, step = tmp_path / "run.jsonl", {"kind": "header", "version": 4}, {"kind": "step", "step": 1}
    lines_of(path, header, step, header, {**step, "step": 2})
    assert [[fields["step"] for _, fields in read_run(path, k).steps] for k in (0, 1, -1, -2)] == [[1], [2], [2], [1]]
    assert [number for number, _ in read_run(path).steps] == [4]
    with pytest.raises(RecordError, match=rf"holds 2 runs; there is no run {run}"):
        read_run(path, run)
    lines_of(path, header)
    with pytest.raises(RecordError, match=r"holds 1 run; there is no run 1"):
        read_run(path, 1)


def test_numbers_that_only_python_writes_are_read_and_other_lines_are_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"kind": "header", "version": 4}\n{"kind": "step", "step": 1, "loss": NaN}\n\n{"kind": "step", "step": 2}\n'
    )
    assert [(number, fields["step"]) for number, fields in read_run(path).steps] == [(2, 1), (4, 2)]
    path.write_text('{"kind": "header", "version": 4}\n[1, 2]\n')
    with pytest.raises(RecordError, match=r":2: not a line of JSON"):
        list(read_run(path).steps)


def test_other_runs_of_a_folder_keep_their_points(tmp_path):
    write(ad.log.TensorBoard(tmp_path), 1, 2, 3, run_id=OTHER, after=0)
    write(ad.log.TensorBoard(tmp_path), 2, 3, after=1)  # restored into a folder that this run has not written to
    assert not any(entry.HasField("session_log") for entry in events(tmp_path))
    write(ad.log.TensorBoard(tmp_path), 3, after=2)
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
    given = wandb.init()
    sink = ad.log.WandB(given)
    sink.write(event(1))
    sink.close()
    assert (len(wandb.begun), len(given.logged), given.finished) == (2, 1, 0)


def test_wandb_marks_the_first_point_after_a_restore_and_defines_axes_of_each_run(wandb):
    sink = ad.log.WandB()
    write(sink, 4, 5, after=3)
    write(sink, 6, after=5, restored=False)
    first, second = wandb.begun
    assert [data.get("restored_after") for data in first.logged] == [3, None]
    assert [data.get("restored_after") for data in second.logged] == [None]
    assert second.axes.keys() == first.axes.keys() - {"restored_after"}


@pytest.mark.parametrize(
    ("init", "environ", "passed"),
    [
        ({"id": "mine"}, {}, {"id": "mine", "resume": "allow"}),
        ({"id": "mine", "resume": "never"}, {}, {"id": "mine", "resume": "never"}),
        ({}, {"WANDB_RUN_ID": "mine"}, {"resume": "allow"}),
        ({}, {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, {}),
        ({"resume": "auto"}, {}, {"resume": "auto"}),
        ({"resume": True}, {}, {"resume": True}),
        ({"resume_from": "mine?_step=3"}, {}, {"resume_from": "mine?_step=3"}),
        ({"fork_from": "mine?_step=3"}, {}, {"fork_from": "mine?_step=3"}),
    ],
)
def test_user_settings_of_the_wandb_run_take_precedence(wandb, monkeypatch, init, environ, passed):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    write(ad.log.WandB(**init), 1)
    assert wandb.begun[0].init == passed


def test_one_run_stays_one_wandb_run_offline(tmp_path):
    """With wandb itself: in two processes, of which each calls `run` twice, and with a restore in place."""
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
    ids, points = set(), []
    for file in files:
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                points.append((int(items["step"]), items.get("restored_after")))
    assert len(files) == 3  # `wandb sync` joins those of one id
    assert len(ids) == 1
    assert points == [
        *[(1, None), (2, None), (3, None)],
        *[(4, None), (5, None), (4, "3"), (5, None), (6, None)],
        *[(4, "3"), (5, None), (6, None), (7, None)],
    ]


def wandb_records(path):
    """The records of an offline run: in blocks of 32 KiB, in which records are whole or in parts, as LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, text = path.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        text, at = text + raw[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(text)
            text = b""
