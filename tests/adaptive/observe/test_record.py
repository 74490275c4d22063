"""A record never ends a run: a failure to write it is noted, and the run continues."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys

import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.base.decision import Decision
from adaptive.observe import record as _record
from adaptive.observe import sinks as _sinks
from adaptive.observe.line_file import LineFile
from adaptive.observe.recorded import read_parts, read_run
from adaptive.runtime.local_world import LocalWorld
from controllers.simulate import read_trace
from tests.adaptive.drivers import Recorder, event, make_data

COVERS = ("adaptive/observe/recorded.py",)


@pytest.fixture(autouse=True)
def in_the_step(monkeypatch):
    """Lines are written when they are made, so that it is known in which step the disk is full."""
    monkeypatch.setattr(_sinks, "INTERVAL", 0)


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "trace.jsonl"


@pytest.fixture(scope="module")
def program():
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        operators.hook("grow", Recorder(decide), (mean, 1j * mean.astype(complex)), every=2)
        return state + mean, {}

    def decide(observation):
        return Decision(shares=(1.0,), notes=("as it was",))

    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(), resizable=False) as program:
        program.step()
        yield program


class Full(LineFile):
    """A disk that has room for so many lines, and then for half a line."""

    lines = 0

    def write(self, text):
        self.lines -= 1
        if self.lines < 0:
            self._file.write(text[: len(text) // 2].encode())
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(text)


def full_behind(monkeypatch, lines):
    monkeypatch.setattr(Full, "lines", lines)
    monkeypatch.setattr(_record, "LineFile", Full)


def notes_of(program, caplog, **options):
    """The steps' notes on the record, of three steps; and what was logged."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "adaptive"):
        notes = [[n for n in r.notes if "not recorded" in n] for r in program.run(steps=3, **options)]
    return notes, [record.message for record in caplog.records]


@pytest.mark.parametrize("path", ["no such folder/trace", ".", "/dev/full"])
def test_the_run_continues_if_the_record_cannot_be_written(program, tmp_path, path, caplog):
    notes, logged = notes_of(program, caplog, record=tmp_path / path)
    assert [len(n) for n in notes] == [1, 0, 0]
    assert notes[0] == logged
    assert "the run is not recorded any more: " in logged[0]
    assert logged[0].endswith(str(tmp_path / path))


def test_a_disk_that_fills_up_ends_the_record_and_not_the_run(program, trace, monkeypatch, caplog):
    full_behind(monkeypatch, lines=2)  # the header and a step
    notes, logged = notes_of(program, caplog, record=trace)
    assert [len(n) for n in notes] == [0, 1, 0]
    assert notes[1] == logged == [f"the run is not recorded any more: {os.strerror(errno.ENOSPC)}: {trace}"]
    assert len(trace.read_text().splitlines()) == 3  # half a line of the second step, and nothing behind it


def test_a_read_only_disk_is_as_none(program, trace, monkeypatch, caplog):
    def opened(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(_record, "LineFile", opened)
    notes, logged = notes_of(program, caplog, record=trace)
    assert [len(n) for n in notes] == [1, 0, 0]
    assert os.strerror(errno.EROFS) in logged[0]


def test_a_line_truncated_by_a_full_disk_is_repaired_later(program, trace, monkeypatch, caplog):
    with monkeypatch.context() as filling:
        full_behind(filling, lines=3)
        list(program.run(steps=4, record=trace))
    first = program.steps
    list(program.run(steps=3, record=trace))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "adaptive"):
        found = read_trace(trace)
    assert [step.step for step in found.steps] == [first - 3, first - 2, first + 1, first + 2, first + 3]
    assert caplog.records == []


def test_the_cut_end_of_another_run_is_removed(program, trace):
    list(program.run(steps=2, record=trace))
    whole = trace.read_bytes()
    trace.write_bytes(whole[:-9])
    sink = ad.log.JSONL(trace)
    sink.write(event(1, run_id="another"))
    sink.close()
    assert trace.read_bytes().startswith(whole.rstrip(b"\n").rpartition(b"\n")[0] + b"\n{")
    assert [len(read_trace(trace, run).steps) for run in (0, 1)] == [1, 1]


def test_a_line_that_was_cut_is_skipped_with_a_warning(program, trace, caplog):
    list(program.run(steps=2, record=trace))
    trace.write_bytes(trace.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING, "adaptive"):
        assert len(read_trace(trace).steps) == 1
    assert f"{trace}:3: this line is truncated" in caplog.records[0].message


def test_two_calls_of_run_are_one_run_in_the_record(program, trace):
    for _ in range(2):
        list(program.run(steps=1, record=trace))
    lines = trace.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["header", "step", "header", "step"]
    assert len(read_parts(trace)) == 1
    assert len(read_trace(trace).steps) == 2


def test_values_that_json_cannot_express_do_not_end_the_run(program, trace, monkeypatch):
    monkeypatch.setattr(
        program._parts.hooks.hooks[0].handler, "_decide", lambda o: Decision(shares=np.ones(1, np.float32))
    )
    list(program.run(steps=2, record=trace))
    (asked,) = [step.decision for step in read_trace(trace).steps if step.decision]
    assert asked.shares == (1.0,)


def test_infinite_values_keep_their_sign(trace):
    def driver(state, batch):
        operators.hook("watch", Recorder(lambda o: None), (np.array([np.inf, -np.inf, np.nan]),))
        return state + comm.all_reduce(batch["y"].mean()), {}

    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(), nonfinite="allow") as program:
        list(program.run(steps=1, record=trace))
    (line,) = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    assert line["hooks"]["0/watch"] == [["inf", "-inf", None]]


def test_unchanged_fields_are_omitted_and_restored_when_read(trace):
    def driver(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), {}

    events = []
    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(2), deterministic=True) as program:
        program.subscribe(events.append)
        for report in program.run(steps=6, record=trace):
            if report.step == 3:
                program.rescale(global_batch=8)
    lines = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    assert ["members" in line for line in lines] == [True] + [False] * 5
    assert len({written.report.batch_sizes for written in events}) == 2
    for written, (_, fields) in zip(events, read_run(trace).steps, strict=True):
        assert fields["previous_batch_sizes"] == list(written.previous_batch_sizes)
        assert fields["members"] == list(written.report.members)
        assert fields["asked"]["global_batch"] == written.asked.global_batch


def test_records_are_read_alike_without_the_faster_reader(program, trace, monkeypatch):
    list(program.run(steps=2, record=trace))
    fast = read_run(trace)
    monkeypatch.setitem(sys.modules, "orjson", None)
    slow = read_run(trace)
    assert (slow.header, list(slow.steps)) == (fast.header, list(fast.steps))


def test_a_recorded_decision_names_its_hook(program, trace):
    list(program.run(steps=2, record=trace))
    assert [f["decision"]["by"] for _, f in read_run(trace).steps if f["decision"]] == [["grow"]]
