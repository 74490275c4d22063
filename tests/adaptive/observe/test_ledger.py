"""Every second of a run has a cause, through kills and restarts."""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import adaptive as ad
import collectives as comm
from adaptive.observe.ledger import CAUSES, ledger_of
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
        header = {"kind": "header", "version": 6, "run_id": "a", "workers": 2, "breakdown": PARTS, "hooks": []}
        with self.path.open("a") as file:
            file.write(json.dumps(header) + "\n")

    def add(self, *, script=0.0, line=None, **parts):
        """Add a step with these seconds by part."""
        self.step += 1
        self.now += script + sum(parts.values())
        micro = {"input": [0, 0], "computing": [0, 0], "busy": [0, 0], "together": 0}
        fields = {"batch_sizes": [4, 4], "at": self.now, "epoch": 0.0, "metrics": {}, "hooks": {}, "skipped": False,
                  "message_bytes": 0, "microseconds": micro, "seconds": sum(parts.values()),
                  "breakdown": [parts.get(name, 0.0) for name in PARTS]}  # fmt: skip
        fields |= {"between": {"script": script}} if script else {}
        with self.path.open("a") as file:
            restored = {"restored": True} if line and "restored" in line else {}
            begins = {"kind": "step", "run_id": "a", "step": self.step, **restored}
            file.write(json.dumps(begins | fields | (line or {}), separators=(",", ":")) + "\n")

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
    ledger = ledger_of(ad.log.read(run.path, discarded=True))
    seconds = ledger.seconds
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
    assert ledger[1:] == (31, 2, 1, 24, 1)  # the loss is in a discarded step
    assert ledger.goodput == pytest.approx((seconds["computing"] + seconds["exchanging"]) / ledger.wall)


def test_the_ledger_attributes_time_to_losses_joins_and_skipped_steps(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    for _ in range(30):
        run.add(computing=0.1, exchanging=0.05)
    run.add(computing=0.1, exchanging=0.05, waiting=0.7, line={"lost": ["rank 1"]})
    run.add(computing=0.1, exchanging=0.05, other=0.3, line={"joined": [1]})
    run.add(computing=0.1, exchanging=0.05, waiting=0.2, line={"lost": ["rank 1"], "joined": [1]})  # a repair
    run.add(computing=0.2, line={"skipped": True})
    run.now += 3  # nobody knows of it
    run.add(computing=0.1, exchanging=0.05)
    seconds = ledger_of(ad.log.read(run.path, discarded=True)).seconds
    assert seconds["repairs"] == pytest.approx(0.9)
    assert seconds["joins"] == pytest.approx(0.3)
    assert seconds["skipped steps"] == pytest.approx(0.2)
    assert seconds["computing"] == pytest.approx(3.4)
    assert seconds["unaccounted"] == pytest.approx(3)


@pytest.mark.parametrize(("late", "script", "waiting"), [(0, 0.039, 0.0), (1, 0.0, 0.039)])
def test_a_script_that_makes_others_wait_is_no_computing(tmp_path, late, script, waiting):
    run = Written(tmp_path / "run.jsonl")
    busy = [40_000 if worker == late else 1000 for worker in range(2)]
    micro = {"input": [0, 0], "computing": [1000, 1000], "busy": busy, "together": 40_000}
    for _ in range(10):
        run.add(script=script, computing=0.001, waiting=waiting, line={"microseconds": micro})
    seconds = ledger_of(ad.log.read(run.path, discarded=True)).seconds
    assert [seconds[name] for name in ("computing", "script", "waiting")] == pytest.approx(
        [0.01, 10 * script, 10 * waiting]
    )


def test_clocks_that_differ_make_no_negative_intervals(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.add(computing=1)
    run.start(down=-5, start=1, build=1, computing=1)
    ledger = ledger_of(ad.log.read(run.path, discarded=True))
    assert ledger.wall == pytest.approx(1)
    assert min(ledger.seconds[name] for name in ("down", "start", "tracing and compiling")) == 0


def test_all_that_lies_between_steps_has_a_cause(tmp_path):
    run = Written(tmp_path / "run.jsonl")
    run.add(computing=1)
    between = {"script": 1, "evaluating": 2, "saving": 3, "restoring": 4, "waiting": 5, "compiling": 6, "hooks": 7}
    run.now += sum(between.values())
    run.add(computing=1, waiting=1, line={"between": between})
    expected = {"script": 8, "evaluating": 2, "checkpoints": 3, "restore": 4, "waiting": 6, "tracing and compiling": 6}
    ledger = ledger_of(ad.log.read(run.path, discarded=True))
    assert ledger.seconds == pytest.approx(dict.fromkeys(CAUSES, 0.0) | expected | {"computing": 2}, abs=1e-5)
    assert ledger.goodput == pytest.approx(2 / 31)


def test_a_run_in_two_parts_is_accounted_for_within_a_hundredth(tmp_path):

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
    ledger = ledger_of(ad.log.read(record, discarded=True))
    seconds = ledger.seconds
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    origin, last = next(line["origin"] for line in lines if "origin" in line), lines[-1]["at"]
    assert origin["process"] == pytest.approx(psutil.Process().create_time(), abs=1e-3)
    assert (origin["command"], origin["versions"]["jax"]) == (sys.argv, jax.__version__)
    assert (len(origin["hosts"]), origin["settings"]["batch sizes"]) == (1, [8])
    assert ledger.wall == pytest.approx(last - origin["process"], abs=1e-3)
    assert sum(seconds.values()) == pytest.approx(ledger.wall)
    assert abs(seconds["unaccounted"]) < 0.01 * (last - origin["build"])
    assert (ledger.steps, ledger.starts, ledger.restores, ledger.repeated) == (15, 2, 1, 3)
    assert seconds["restore"] > 0
    assert seconds["checkpoints"] > 0
    assert seconds["script"] >= 14 * 0.01
    assert set(seconds) == set(CAUSES)
