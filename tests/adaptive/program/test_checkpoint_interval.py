"""Checkpoints one after another, and at the interval of Young and Daly: with clocks and writers of our own."""

from __future__ import annotations

import threading
from math import sqrt

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.program import run_checkpointer
from adaptive.program.checkpoint_interval import PRIOR_SECONDS, BestInterval
from adaptive.program.run_checkpointer import RunCheckpointer
from adaptive.program.writer import Writer
from adaptive.runtime.local_world import LocalWorld
from tests.threaded_world import Job

COVERS = ("adaptive/program/checkpoints.py", "adaptive/program/run_checkpointer.py", "adaptive/program/writer.py")

DATA = {"x": np.arange(64, dtype=np.float32)}


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {}


def built(world):
    return ad.Program(driver, jnp.zeros(()), DATA, global_batch=8, world=world, deterministic=True, resizable=False)


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_before_any_loss_there_is_as_if_one_in_a_day():
    best = BestInterval()
    assert (best.stall, best.seconds(0, 0), best.news(0, 0)) == (None, 0, "")
    best.record_stall(0.1)
    assert best.seconds(0, 0) == pytest.approx(sqrt(2 * 0.1 * 86400))
    assert best.seconds(0, 0) == pytest.approx(2.2 * 60, rel=0.01)  # as docs/checkpoints.md says
    assert best.seconds(3600, 1) == pytest.approx(1.5 * 60, rel=0.06)


def test_losses_shorten_the_interval_and_quiet_time_lengthens_it():
    best = BestInterval()
    best.record_stall(1.0)
    best.record_stall(3.0)
    assert best.stall == 2
    assert best.seconds(PRIOR_SECONDS, 0) == pytest.approx(sqrt(2 * 2 * 2 * PRIOR_SECONDS))
    assert best.seconds(PRIOR_SECONDS, 7) == pytest.approx(sqrt(2 * 2 * 2 * PRIOR_SECONDS / 8))


def test_a_change_of_the_interval_is_reported():
    best = BestInterval()
    best.record_stall(2.0)
    said = best.news(0, 0)
    assert "a checkpoint every 588 s" in said
    assert "stalls the steps for 2 s" in said
    assert "0 in 0 h and a prior of one in a day" in said
    assert best.news(3600, 0) == ""
    assert "from 1 in 1 h" in best.news(3600, 1)


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch):
    """The steps of the checkpoints that would be written; none is."""
    steps = []
    monkeypatch.setattr(Writer, "write", lambda writer, checkpoint: steps.append(checkpoint["step"]))
    return steps


def test_the_next_one_begins_when_the_last_is_on_the_disk(tmp_path, monkeypatch, written):
    busy = [False]
    monkeypatch.setattr(Writer, "busy", property(lambda writer: busy[0]))
    with built(LocalWorld(1)) as program:
        for report in program.run(steps=6, checkpoint=ad.Checkpoints(tmp_path, every="continuous")):
            busy[0] = report.step in (1, 2, 4)
            assert report.notes == ()
    assert sorted(set(written)) == [1, 4, 6]


def test_with_a_real_disk_the_last_state_is_there_and_none_is_skipped(tmp_path):
    with built(LocalWorld(1)) as program:
        reports = list(program.run(steps=20, checkpoint=ad.Checkpoints(tmp_path, every="continuous", keep=2)))
        assert ad.Checkpoints(tmp_path).read()["step"] == 20
        assert not [note for report in reports for note in report.notes]


@pytest.mark.parametrize(("losses", "after"), [(0, [1, 11, 21]), (8, [1, 5, 9, 13, 17, 21])])
def test_auto_is_the_interval_of_the_measured_stall_and_the_losses(tmp_path, monkeypatch, written, losses, after):
    now, snapshot = [0.0], run_checkpointer.snapshot
    monkeypatch.setattr("adaptive.program.run_checkpointer.time.monotonic", lambda: now[0])

    def stalls(*given):
        now[0] += 2.0
        return snapshot(*given)

    monkeypatch.setattr(run_checkpointer, "snapshot", stalls)
    world, notes = LocalWorld(1), []
    with built(world) as program:
        for report in program.run(steps=21, checkpoint=ad.Checkpoints(tmp_path, every="auto")):
            if report.step == 1:
                monkeypatch.setattr(type(world), "losses", (None,) * losses)
            now[0] += 60
            notes += [str(note) for note in report.notes if "every=" in str(note)]
    assert sorted(set(written)) == after
    assert len(notes) == 1
    assert f"stalls the steps for 2 s, and the mean time between losses is {24 if not losses else 2.67} h" in notes[0]


@pytest.mark.parametrize("every", ["continuous", "auto"])
def test_all_processes_save_after_the_same_steps(tmp_path, monkeypatch, every):
    saved, save, lock = {0: [], 1: []}, RunCheckpointer.save, threading.Lock()

    def noted(checkpointer, **options):
        with lock:
            saved[checkpointer.world.rank].append(checkpointer._parts.run.step)
        save(checkpointer, **options)

    monkeypatch.setattr(RunCheckpointer, "save", noted)

    def script(world):
        with built(world) as program:
            for _ in program.run(steps=12, checkpoint=ad.Checkpoints(tmp_path, every=every)):
                pass

    Job(2).run(script)
    assert [step for step in saved[0] if step < 12] == [step for step in saved[1] if step < 12]
    assert saved[1][0] == 2  # announced after the first step


def test_they_need_messages_where_there_are_several_processes(tmp_path):
    def script(world):
        def alone(state, batch):
            return state + 1.0, {}

        data = {"x": np.arange(64, dtype=np.float32)}
        program = ad.Program(alone, jnp.zeros(()), data, global_batch=8, world=world)
        with program, pytest.raises((ad.CheckpointError, ad.WorkerError), match="sends no messages"):
            list(program.run(steps=1, checkpoint=ad.Checkpoints(tmp_path, every="continuous")))

    Job(2).run(script)
