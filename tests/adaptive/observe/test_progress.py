"""The progress line on a terminal and elsewhere, in every phase of a run."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import adaptive as ad
import collectives as comm
from adaptive.base import activity as _activity
from adaptive.base.activity import Activity
from adaptive.base.process.thread_status import thread_status
from adaptive.observe import progress as _progress
from adaptive.observe.events import HookValues
from adaptive.observe.progress import Course, Progress
from adaptive.observe.scalars import sizes_in_words
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data
from tests.speed import Deadline

COURSE = Course("train", (2, 2), 24, 3, None, True)


class Bench:
    """A progress line without a run: its console, and what it looks at."""

    def __init__(self, *, terminal=False, rank=0, course=COURSE):
        self.world, self.text = LocalWorld(2), io.StringIO()
        self.world.rank = rank
        self.activity = Activity(self.world)
        self.kernels = SimpleNamespace(warm=True)
        console = Console(file=self.text, force_terminal=terminal, width=200)
        self.line = Progress(course, self.world, self.activity, self.kernels, console)

    def stands_still(self):
        """Return the line after some time without an event."""
        self.line._last_seen -= 7
        return self.line.line()

    @property
    def lines(self):
        return self.text.getvalue().splitlines()


@pytest.fixture
def bench():
    made = []

    def make(**options):
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.line.close()


# --- what it says -----------------------------------------------------------------------------------------------------


NAMES = ("n.scale", "n.lower", "n.upper")


@pytest.mark.parametrize(
    ("metrics", "noise", "words"),
    [
        ({"accuracy": 0.5, "loss": np.float32(0.15894)}, (54.63, 41.2, np.float32(1180)), "loss 0.1589"),
        ({"a": 1.0, "b": {"loss": 2.0}}, (99.96, 1.234, 100.4), "b.loss 2"),
        ({"noise": 1.0, "a": 0.123456, "b": 2.0, "c": 3.0, "d": 4.0}, (5.0, np.nan, np.nan), "a 0.1235  b 2  c 3"),
        (7.0, (12345.6, 100.0, np.inf), "metric 7"),
    ],
)
def test_progress_shows_step_epoch_loss_and_noise(bench, metrics, noise, words):
    there = bench()
    there.line(event(69, metrics, hooks=[HookValues("0/adapt", 1, NAMES, list(noise))], sizes=(25, 24)))
    shown = there.line.line()
    assert shown.startswith(f"epoch 6.9/3  step 69  {words}  98 examples/s  batch 25 + 24 = 49  noise ")
    expected = {54.63: "54.6 [41.2, 1,180]", 99.96: "100 [1.23, 100]", 5.0: "5", 12345.6: "12,346 [100, inf]"}
    assert shown.endswith(f"noise {expected[noise[0]]}")


def test_a_run_begins_with_what_it_has(bench):
    course = COURSE._replace(batch_sizes=(4, 0), compiles=False)
    assert bench(course=course).lines == ["train: 1 worker, 24 examples, batch 4 + – = 4"]
    assert bench(course=course._replace(examples=None)).lines == ["train: 1 worker, batch 4 + – = 4"]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((0, 0), "0"),
        ((32,) * 16, "16 × 32 = 512"),
        ((1064,), "1,064"),
        ((30, 34, *[32] * 14, 0), "16 × 30…34 = 512"),
    ],
)
def test_sizes_in_words(sizes, text):
    assert sizes_in_words(sizes) == text


# --- what it waits for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activity", "words"),
    [
        (_activity.INPUT, "waiting 7 s: input"),
        (_activity.COMPILING, "waiting 7 s: compiling"),
        (_activity.BETWEEN, "waiting 7 s: script, test_progress.py:"),
    ],
)
def test_progress_names_what_a_stalled_run_waits_for(bench, activity, words):
    there = bench()
    there.line(event(2))
    there.activity.turn(activity)
    assert words in there.stands_still()


@pytest.mark.parametrize(("seconds_a_step", "waits"), [(2.0, True), (3.0, False)])
def test_a_step_that_takes_as_long_as_the_others_is_not_stalled(bench, seconds_a_step, waits):
    there = bench()
    there.activity.turn(_activity.INPUT)
    for step in (1, 2, 3):
        there.line(event(step, seconds=seconds_a_step if step > 1 else 99.0))
    assert ("waiting 7 s" in there.stands_still()) == waits


def test_between_steps_progress_names_the_call_of_the_script(bench):
    there = bench()
    there.line(event())
    there.activity.turn(_activity.BETWEEN)

    @thread_status("in evaluate")
    def evaluating():
        return there.stands_still()

    assert evaluating().endswith("waiting 7 s: in evaluate")


def test_progress_shows_kernels_compiled_in_the_background(bench):
    there = bench()
    there.line(event())
    there.kernels.warm = False
    assert there.line.line().endswith("(compiling kernels)")


# --- how it is shown --------------------------------------------------------------------------------------------------


def test_plain_lines_at_the_start_at_ends_of_epochs_and_now_and_then(bench, monkeypatch):
    monkeypatch.setattr(_progress, "PLAIN_SECONDS", 0.3)
    there = bench()
    assert there.lines == ["train: 2 workers, 24 examples, batch 2 + 2 = 4", "compiling …"]
    for step in range(1, 5):
        there.line(event(step))
    assert len(there.lines) == 3  # the first step
    monkeypatch.setattr(_progress, "_EPOCH_SECONDS", 0)
    there.line(event(5, epoch_ended=True))
    assert there.lines[3].startswith("epoch 0.5/3  step 5  loss 5")
    deadline = Deadline(30)
    while len(there.lines) < 5:
        assert deadline.left()
        time.sleep(0.05)
    there.line.close(ZeroDivisionError())
    assert there.lines[-1].startswith("train ended by ZeroDivisionError after 5 steps in ")
    count = len(there.lines)
    there.line.close()
    assert len(there.lines) == count


@pytest.mark.parametrize(
    ("error", "how"), [(None, "ended"), (GeneratorExit(), "ended"), (ValueError("no"), "ended by ValueError")]
)
def test_the_last_lines_sum_the_run_up(bench, error, how):
    there = bench()
    hooks = [HookValues("0/adapt", 1, (), []), HookValues("1/balance", 1, (), [], "workers are equally fast")]
    for step in (1, 2, 3, 2, 3, 3):
        made = event(step, hooks=hooks, sizes=(25, 24), waited_seconds=step / 2)
        there.line(replace(made, decided=("adapt",) if step == 3 else ()))
    there.line._began -= 100
    there.line.close(error)
    first, *others = there.lines[-3:]
    assert first.startswith(f"train {how} after 6 steps (3 of them again, after a restore) in ")
    assert first.endswith(
        "epoch 0.3/3, step 3, loss 3, 3 examples/s, batch 25 + 24 = 49, 1.5 s of waiting for a compiler"
    )
    assert others == ["adapt: 3 requests", "balance: 0 requests; the last time none: workers are equally fast"]


def test_a_run_that_ends_before_its_first_step_says_so(bench):
    there = bench()
    there.line.close(KeyboardInterrupt())
    assert there.lines[-1].startswith("train ended by KeyboardInterrupt before its first step, after 0.")


def test_on_a_terminal_there_is_one_line_that_changes(bench):
    there = bench(terminal=True)
    there.line(event(1, epoch_ended=True))
    there.line.refresh()
    there.line(event(2))
    assert "step 1" in there.text.getvalue()
    assert "\r" in there.text.getvalue()
    there.line.close()
    assert "ended after 2 steps" in there.lines[-1]


def test_only_rank_0_shows_progress_and_its_successor_continues(bench, monkeypatch):
    monkeypatch.setattr(_progress, "PLAIN_SECONDS", 0.05)
    other = bench(rank=1)
    other.line(event(1))
    other.line.close()
    there = bench(rank=1)
    there.line(event(1))
    assert there.lines == other.lines == []
    there.world.rank = 0
    there.line(event(2, epoch_ended=True))
    assert there.lines[-1].startswith("epoch 0.2/3  step 2")
    deadline = Deadline(30)
    while len(there.lines) < 2:  # also between its steps
        assert deadline.left()
        time.sleep(0.01)


def test_a_run_shows_it_until_its_end(capsys):
    def driver(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), {"loss": state}

    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(2), resizable=False) as program:
        for report in program.run(epochs=2, progress=True):
            if report.epoch_ended:
                print("the script's own line")
        for _ in program.run(progress=True):
            break
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "the script's own line\n" * 2
    assert lines[0] == "driver: 2 workers, 24 examples, batch 2 + 2 = 4"
    assert lines[1].startswith("compiling ")
    assert lines[2].startswith("epoch 0.2/2  step 1  loss ")
    assert any(line.startswith("driver ended after 12 steps in ") for line in lines)
    assert lines[-1].startswith("driver ended after 1 step in ")
