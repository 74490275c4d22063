"""Every second of a run has a cause, through kills and restarts."""

from __future__ import annotations

import json
import time

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.errors import RecordError
from adaptive.observe import sinks
from adaptive.observe.ledger import CAUSES, goodput, read_ledger
from adaptive.observe.record import JSONL

PARTS = ("input", "computing", "exchanging", "waiting", "hooks", "compiling", "other")
T0 = 1_700_000_000.0


class Written:
    """A record that is written line by line, with a clock that the test sets."""

    def __init__(self, path):
        self.path, self.now, self.step = path, T0, 0
        self.begin()

    def begin(self):
        """Write a header."""
        header = {"kind": "header", "version": 4, "run_id": "0123456789ab", "workers": 2, "breakdown": PARTS}
        with self.path.open("a") as file:
            file.write(json.dumps(header) + "\n")

    def add(self, *, script=0.0, line=None, **parts):
        """Add a step with these seconds by part."""
        self.step += 1
        self.now += script + sum(parts.values())
        fields = {"kind": "step", "step": self.step, "batch_sizes": [4, 4], "at": self.now, "between": {},
                  "seconds": sum(parts.values()), "breakdown": [parts.get(name, 0.0) for name in PARTS]}  # fmt: skip
        fields |= {"between": {"script": script}} if script else {}
        with self.path.open("a") as file:
            file.write(json.dumps(fields | (line or {})) + "\n")

    def start(self, *, down, start, build, **parts):
        """Add the first step of a process, which starts `down` seconds after the last step."""
        process = self.now + down
        origin = {"process": process, "build": process + start, "built": process + start + build}
        self.now = origin["built"]
        self.add(line={"origin": origin}, **parts)

    def restored(self, step):
        """Go back to this step, as a restart does. Returns the fields of the next line that say so."""
        self.step = step
        self.begin()
        return {"restored": True}


def test_each_second_of_a_run_with_kills_has_the_cause_it_was_made_of(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.start(down=0, start=3, build=2, computing=0.5, compiling=4)
    for _ in range(30):
        run.add(computing=0.1, exchanging=0.05, input=0.02, script=0.03)
    run.add(computing=0.1, exchanging=0.05, input=0.02, waiting=0.7, line={"lost": ["rank 1"]})
    run.add(computing=0.1, exchanging=0.05, input=0.02, other=0.3, line={"joined": [1]})
    run.add(computing=0.1, line={"skipped": True})
    ends = run.now
    restored = run.restored(10)  # the process is killed, and goes on after step 10
    process = ends + 5
    origin = {"process": process, "build": process + 3, "built": process + 5}
    run.now = origin["built"]
    run.add(computing=0.1, script=0.5, line={"origin": origin, **restored})
    for _ in range(20):
        run.add(computing=0.1, exchanging=0.05)
    ledger = read_ledger(run.path)
    seconds = ledger.by_cause()
    assert ledger.wall == pytest.approx(run.now - T0)
    assert sum(seconds.values()) == pytest.approx(run.now - T0)
    assert abs(seconds["unaccounted"]) < 1e-3
    assert seconds["start"] == pytest.approx(6)
    assert seconds["down"] == pytest.approx(5)
    assert seconds["tracing and compiling"] == pytest.approx(8)
    assert seconds["first step"] == pytest.approx(0.4)
    repeated = 21 * 0.17 + 0.87 + 0.47 + 0.1  # steps 11 to 34
    assert seconds["repeated steps"] == pytest.approx(repeated, abs=1e-3)
    assert seconds["script"] == pytest.approx(30 * 0.03 + 0.5)
    assert seconds["computing"] == pytest.approx(31 * 0.1)
    assert (ledger.steps, ledger.starts, ledger.restores, ledger.losses) == (
        31,
        2,
        1,
        1,
    )  # the loss in a discarded step
    assert (ledger.repeated, ledger.examples_lost) == (24, 24 * 8)
    assert goodput(seconds) == pytest.approx((seconds["computing"] + seconds["exchanging"]) / ledger.wall)


def test_the_ledger_attributes_time_to_losses_joins_and_skipped_steps(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    for _ in range(30):
        run.add(computing=0.1, exchanging=0.05)
    run.add(computing=0.1, exchanging=0.05, waiting=0.7, line={"lost": ["rank 1"]})
    run.add(computing=0.1, exchanging=0.05, other=0.3, line={"joined": [1]})
    run.add(computing=0.2, line={"skipped": True})
    seconds = read_ledger(run.path).by_cause()
    assert seconds["repairs"] == pytest.approx(0.7)
    assert seconds["joins"] == pytest.approx(0.3)
    assert seconds["skipped steps"] == pytest.approx(0.2)
    assert seconds["computing"] == pytest.approx(3.2)
    assert seconds["unaccounted"] == pytest.approx(0, abs=1e-4)


def test_a_process_that_repeats_steps_and_is_killed_again_before_a_checkpoint_is_in_the_ledger(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.start(down=0, start=1, build=1, computing=1)
    for _ in range(9):
        run.add(computing=1)
    for _ in range(2):  # each time: down 4, start 2, build 1, and steps up to 10 again
        restored = run.restored(5)
        process = run.now + 4
        origin = {"process": process, "build": process + 2, "built": process + 3}
        run.now = origin["built"]
        run.add(computing=1, line={"origin": origin, **restored})
        for _ in range(4):
            run.add(computing=1)
    ledger = read_ledger(run.path)
    seconds = ledger.by_cause()
    assert ledger.wall == pytest.approx(run.now - T0)
    assert seconds["repeated steps"] == pytest.approx(10)
    assert seconds["computing"] == pytest.approx(10)
    assert seconds["down"] == pytest.approx(8)
    assert seconds["start"] == pytest.approx(5)
    assert seconds["tracing and compiling"] == pytest.approx(3)
    assert seconds["unaccounted"] == pytest.approx(0, abs=1e-4)
    assert (ledger.starts, ledger.restores, ledger.repeated) == (3, 2, 10)


def test_unexplained_time_is_listed_separately(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.add(computing=1)
    run.now += 3
    run.add(computing=1)
    seconds = read_ledger(run.path).by_cause()
    assert seconds["unaccounted"] == pytest.approx(3)
    assert seconds["computing"] == pytest.approx(2)


def test_a_window_has_the_seconds_of_its_own_time(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    for _ in range(10):
        run.add(computing=1)
    for _ in range(10):
        run.add(computing=0.25, input=0.75)
    for _ in range(10):
        run.add(computing=1)
    ledger = read_ledger(run.path)
    assert ledger.by_cause(last=5.0)["computing"] == pytest.approx(5)
    assert ledger.by_cause(last=15.0)["input"] == pytest.approx(5 * 0.75)
    worst = ledger.worst(10.0)
    assert worst["computing"] == pytest.approx(2.5)
    assert worst["input"] == pytest.approx(7.5)
    assert ledger.worst(100.0) is None


def test_discarded_steps_of_two_processes_lie_before_and_after_the_restart_between_them(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.start(down=0, start=1, build=1, computing=1)
    for _ in range(9):
        run.add(computing=1)
    run.start(down=4, start=2, build=1, computing=1)
    for _ in range(4):
        run.add(computing=1)
    run.add(computing=1, line=run.restored(5))
    ledger = read_ledger(run.path)
    for last, expected in (
        (6, {"computing": 1, "repeated steps": 5}),
        (13, {"computing": 1, "repeated steps": 5, "down": 4, "start": 2, "tracing and compiling": 1}),
        (18, {"computing": 1, "repeated steps": 10, "down": 4, "start": 2, "tracing and compiling": 1}),
        (25, {"computing": 6, "repeated steps": 10, "down": 4, "start": 3, "tracing and compiling": 2}),
    ):
        assert ledger.by_cause(last) == pytest.approx(dict.fromkeys(CAUSES, 0.0) | expected, abs=1e-5)
    assert (ledger.steps, ledger.starts, ledger.restores, ledger.repeated) == (6, 2, 1, 10)


def test_a_run_that_begins_again_is_accounted_for_from_its_first_process(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.start(down=0, start=3, build=2, computing=1)
    run.add(computing=1, script=1)
    run.add(computing=1, line=run.restored(0))
    ledger = read_ledger(run.path)
    expected = {"start": 3, "tracing and compiling": 2, "repeated steps": 2, "script": 1, "computing": 1}
    assert ledger.by_cause() == pytest.approx(dict.fromkeys(CAUSES, 0.0) | expected, abs=1e-5)
    assert (ledger.steps, ledger.starts, ledger.repeated, ledger.examples_lost) == (1, 1, 2, 16)


def test_discarded_steps_of_a_record_without_a_start_are_accounted_for(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    for _ in range(3):
        run.add(computing=1, script=0.5, line={"lost": ["rank 1"]})
    run.add(computing=1, line=run.restored(0))
    ledger = read_ledger(run.path)
    expected = {"repeated steps": 3, "script": 1.5, "computing": 1}
    assert ledger.by_cause() == pytest.approx(dict.fromkeys(CAUSES, 0.0) | expected, abs=1e-5)
    assert (ledger.starts, ledger.losses, ledger.examples_lost) == (0, 3, 24)


@pytest.mark.parametrize(("lost_at", "usual"), [(25, 0.1), (2, 0.1), (45, 0.2)])
def test_the_excess_of_a_step_lies_in_its_own_interval(tmp_path, lost_at, usual):
    """Over the last 20 usual steps before it; over the first ones if there are fewer."""
    run = Written(tmp_path / "run.jsonl")
    for step in range(1, 61):
        if step == lost_at:
            run.add(computing=0.5, compiling=0.3, hooks=0.001, line={"lost": ["rank 1"]})
            end = run.now
        else:
            run.add(computing=0.1 if step <= 22 else 0.2, hooks=0.002)
    ledger = read_ledger(run.path)
    expected = {"computing": usual, "repairs": 0.5 - usual, "tracing and compiling": 0.3, "hooks": 0.001}
    found = {
        name: s - ledger.by_cause(run.now - end)[name] for name, s in ledger.by_cause(run.now - end + 0.801).items()
    }
    assert found == pytest.approx(dict.fromkeys(CAUSES, 0.0) | expected, abs=1e-5)


def test_clocks_that_differ_make_no_negative_intervals(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.add(computing=1)
    run.start(down=-5, start=1, build=1, computing=1)
    ledger = read_ledger(run.path)
    assert ledger.ends.tolist() == sorted(ledger.ends)
    assert ledger.wall == pytest.approx(1)
    assert min(ledger.by_cause()[name] for name in ("down", "start", "tracing and compiling")) == 0


def test_all_that_lies_between_steps_has_a_cause(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.add(computing=1)
    between = {"script": 1, "evaluating": 2, "saving": 3, "restoring": 4, "waiting": 5, "compiling": 6, "hooks": 7}
    run.now += sum(between.values())
    run.add(computing=1, waiting=1, line={"between": between})
    expected = {"script": 8, "evaluating": 2, "checkpoints": 3, "restore": 4, "waiting": 6, "tracing and compiling": 6}
    ledger = read_ledger(run.path)
    assert ledger.by_cause() == pytest.approx(dict.fromkeys(CAUSES, 0.0) | expected | {"computing": 2}, abs=1e-5)
    assert goodput(ledger.by_cause()) == pytest.approx(2 / 31)
    assert np.isnan(goodput(dict.fromkeys(CAUSES, 0.0)))


def test_the_worst_window_may_be_the_whole_run(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.add(computing=2, exchanging=2)
    run.add(computing=2, input=2)
    assert read_ledger(run.path).worst(7.999)["computing"] == pytest.approx(4, abs=0.01)
    assert read_ledger(run.path).worst(4)["exchanging"] == pytest.approx(0, abs=1e-5)
    assert read_ledger(run.path).worst(8.001) is None


def test_a_record_without_steps_is_refused(tmp_path):
    with pytest.raises(RecordError, match="has no steps"):
        read_ledger(Written(tmp_path / "run.jsonl").path)


def test_an_older_record_is_refused_with_what_to_do(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.add(computing=1)
    run.path.write_text(run.path.read_text().replace('"at"', '"then"'))
    with pytest.raises(RecordError, match="Record the run again"):
        read_ledger(run.path)


def test_a_run_in_two_parts_is_accounted_for_within_a_hundredth(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "INTERVAL", 0)

    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean()), {}

    def program():
        data = {"x": np.arange(64.0, dtype=np.float32)}
        return ad.Program(driver, jnp.zeros(()), data, global_batch=8, world=comm.SoloWorld(), resizable=False)

    record, kept = tmp_path / "run.jsonl", tmp_path / "kept"
    with program() as first:
        log = [JSONL(record)]
        for report in first.run(steps=12, log=log, checkpoint=ad.Checkpoints(kept, every="5 steps")):
            time.sleep(0.01)
            if report.step == 8:
                break
        first.evaluate(lambda state, batch: jnp.mean(batch["x"]), {"x": np.ones(16, np.float32)})
    with program() as second:
        second.restore(kept)
        for report in second.run(steps=10, record=record):
            time.sleep(0.01)
            assert report.step > 5
    ledger = read_ledger(record)
    seconds = ledger.by_cause()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    origin, last = next(line["origin"] for line in lines if "origin" in line), lines[-1]["at"]
    assert ledger.wall == pytest.approx(last - origin["process"], abs=1e-3)
    assert sum(seconds.values()) == pytest.approx(ledger.wall)
    assert abs(seconds["unaccounted"]) < 0.01 * (last - origin["build"])
    assert (ledger.steps, ledger.starts, ledger.restores, ledger.repeated) == (15, 2, 1, 3)
    assert seconds["restore"] > 0
    assert seconds["checkpoints"] > 0
    assert seconds["script"] >= 14 * 0.01
    assert set(seconds) == set(CAUSES)
