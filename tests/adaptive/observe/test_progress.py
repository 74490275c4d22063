"""The progress line on a terminal and elsewhere, in every phase of a run."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import adaptive as ad
import collectives as comm
from adaptive.base import activity as _activity
from adaptive.base.activity import Activity, Breakdown, WorkerSeconds
from adaptive.base.thread_status import thread_status
from adaptive.observe import progress as _progress
from adaptive.observe.events import HookValues
from adaptive.observe.progress import (
    Course,
    Progress,
    figures_in_short,
    noise_in_short,
    sizes_in_short,
    slowest,
    time_lost,
    without_values,
)
from adaptive.observe.scalars import Noise
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data
from tests.speed import limit

COVERS = ("adaptive/base/thread_status.py",)

COURSE = Course("train", (2, 2), 24, 3, None, 5)


class Bench:
    """A progress line without a run: its console, and what it looks at."""

    def __init__(self, monkeypatch, *, terminal=False, rank=0, course=COURSE):
        monkeypatch.setattr(_progress, "REFRESH_SECONDS", 3600)  # the test refreshes it
        self.world, self.text = LocalWorld(2), io.StringIO()
        self.world.rank = rank
        self.activity = Activity(self.world)
        self.kernels = SimpleNamespace(warm=True, buckets_compiled=(3, 9))
        console = Console(file=self.text, force_terminal=terminal, width=200)
        self.line = Progress(course, self.world, self.activity, self.kernels, console)

    def stands_still(self):
        """Return the line after some time without an event."""
        self.line._last_seen -= 7
        return self.line._line()

    @property
    def lines(self):
        return self.text.getvalue().splitlines()


@pytest.fixture
def bench(monkeypatch):
    made = []

    def make(**options):
        made.append(Bench(monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.line.close()


# --- what it says -----------------------------------------------------------------------------------------------------


def test_progress_shows_step_epoch_and_speed():
    noise = HookValues("0/adapt", 1, ("n.scale", "n.lower", "n.upper"), [54.63, 41.2, np.float32(1180)])
    last = event(69, {"accuracy": 0.5, "loss": np.float32(0.15894)}, hooks=[noise], sizes=(25, 24))
    assert figures_in_short(last, COURSE, 3120.4) == [
        "epoch 6.9/3",
        "step 69",
        "loss 0.1589",
        "3,120 examples/s",
        "batch 25 + 24 = 49",
        "noise 54.6 [41.2, 1,180]",
    ]
    without = event(3, {"accuracy": 0.5, "noise": 7.0})
    assert figures_in_short(without, COURSE, None)[2:] == ["accuracy 0.5", "8 examples/s", "batch 2 + 2 = 4", "noise 7"]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"a": 1.0, "b": {"loss": 2.0}}, ["b.loss 2"]),
        ({"noise": 1.0, "a": 0.123456, "b": 2.0, "c": 3.0, "d": 4.0}, ["a 0.1235", "b 2", "c 3"]),
        (7.0, ["metric 7"]),
    ],
)
def test_progress_shows_the_loss_or_else_the_first_metrics(metrics, words):
    shown = figures_in_short(event(3, metrics), replace(COURSE, epochs=None, steps=50), 0.0)
    batch = shown.index("batch 2 + 2 = 4")  # nothing was trained in the last seconds, so there is no speed
    assert shown[:batch] == ["epoch 0.3", "step 3/50", *words]


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (Noise(99.96, 1.234, 100.4), "noise 100 [1.23, 100]"),
        (Noise(5.0, np.nan, np.nan), "noise 5"),
        (Noise(12345.6, 100.0, np.inf), "noise 12,346 [100, inf]"),
    ],
)
def test_a_noise_scale_in_short(noise, words):
    assert noise_in_short(noise) == words


@pytest.mark.parametrize(
    ("sizes", "to_compile", "lines"),
    [
        ((2, 0, 2), 1, ["train: 2 workers, 24 examples, batch 2 + - + 2 = 4", "compiling 1 program …"]),
        ((4,), 0, ["train: 1 worker, 24 examples, batch 4"]),
    ],
)
def test_a_run_begins_with_what_it_has_and_compiles(sizes, to_compile, lines):
    assert replace(COURSE, batch_sizes=sizes, to_compile=to_compile).begins() == lines


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((64,), "64"),
        ((25, 0, 24), "25 + - + 24 = 49"),
        ((4,) * 6, "4 + 4 + 4 + 4 + 4 + 4 = 24"),
        ((4,) * 7, "7 x 4 = 28"),
        ((0, 0), "0"),
        ((32,) * 16, "16 x 32 = 512"),
        ((30, 34, *[32] * 14, 0), "16 x 30…34 = 512"),
    ],
)
def test_sizes_in_short(sizes, text):
    assert sizes_in_short(sizes) == text


def seconds(*busy, input_=0.0):
    return WorkerSeconds(np.full(len(busy), input_), np.array(busy), np.array(busy))


def test_progress_names_the_worker_that_others_wait_for():
    events = [event(workers=seconds(0.1, 0.4)), event(workers=seconds(0.1, 0.3)), event(workers=seconds(0.3, 0.1))]
    assert slowest(events) == 1
    assert slowest([event(workers=seconds(0.0, 0.0))]) is None  # a step without a message
    assert slowest(events[1:]) is None  # now the one, now the other
    assert time_lost(events) == ["others wait for worker 1 33% of the time"]
    in_input = Breakdown(0.3, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0)
    assert time_lost([event(breakdown=in_input, workers=seconds(0.1, 0.1))] * 3) == ["input 60% of the time"]
    assert time_lost([event(breakdown=in_input, workers=seconds(0.1, 0.4))] * 4) == [
        "input 60% of the time",
        "others wait for worker 1 60% of the time",
    ]
    assert time_lost([event(breakdown=in_input)] * 2) == []  # too few to say
    assert time_lost([event(breakdown=in_input, seconds=0.0)] * 3) == []
    assert time_lost([event(workers=seconds(0.1, 0.2))] * 3) == []  # input, and waiting, of a fifth


def test_progress_names_the_hooks_without_values():
    def hooks(seconds, noise):
        balance = HookValues("0/balance", 10, ("seconds",), [np.asarray(seconds)])
        return [balance, HookValues("1/adapt", 20, ("noise.scale",), [np.asarray(noise)])]

    nothing = [event(hooks=hooks([np.nan, np.nan], 3.0))] * 3
    assert without_values(nothing) == ["balance"]
    assert without_values([*nothing, event(hooks=hooks([0.1, np.nan], np.nan))]) == []
    assert without_values(nothing[:2]) == []


# --- what it waits for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activity", "words"),
    [
        (_activity.INPUT, "waiting 7 s for input"),
        (_activity.HOOKS, "waiting 7 s for the hooks"),
        (_activity.COMPILING, "waiting 7 s for the compiler: kernel 4 of 9"),
        (_activity.EXCHANGING, "waiting 7 s for worker 1, or other processes, in message 2"),
        (_activity.BETWEEN, "waiting 7 s for the script, test_progress.py:"),
    ],
)
def test_progress_names_what_a_stalled_run_waits_for(bench, activity, words):
    there = bench()
    there.line(event(2, workers=seconds(0.1, 0.4)))
    there.activity.message = 1
    there.activity.turn(activity)
    assert words in there.stands_still()


def test_before_the_first_step_it_waits_for_the_compiler(bench):
    there = bench()
    there.activity.turn(_activity.COMPILING)
    assert there.stands_still() == "waiting 7 s for the compiler: 5 programs"
    there.activity.turn(_activity.EXCHANGING)
    assert there.stands_still() == "waiting 14 s for other processes in message 1"


@pytest.mark.parametrize(
    ("compiled", "words"), [((8, 9), "kernel 9 of 9"), ((9, 9), "kernel 9 of 9"), ((0, 0), "a program")]
)
def test_a_stalled_step_names_the_kernel_that_is_compiled(bench, compiled, words):
    there = bench()
    there.kernels.buckets_compiled = compiled
    there.line(event())
    there.activity.turn(_activity.COMPILING)
    assert there.stands_still().endswith(f"waiting 7 s for the compiler: {words}")


@pytest.mark.parametrize(("seconds_a_step", "waits"), [(0.5, True), (2.0, True), (3.0, False)])
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
    assert "kernel" not in there.line._line()
    there.kernels.warm = False
    assert there.line._line().endswith("(compiling kernel 4 of 9 in the background)")


# --- how it is shown --------------------------------------------------------------------------------------------------


def test_plain_lines_at_the_start_at_ends_of_epochs_and_now_and_then(bench, monkeypatch):
    there = bench()
    assert there.lines == ["train: 2 workers, 24 examples, batch 2 + 2 = 4", "compiling 5 programs …"]
    for step in range(1, 5):
        there.line(event(step))
    assert len(there.lines) == 3  # the first step
    monkeypatch.setattr(_progress, "_EPOCH_SECONDS", 0)
    there.line(event(5, epoch_ended=True))
    assert there.lines[-1].startswith("epoch 0.5/3  step 5  loss 5")
    there.line._look()
    assert len(there.lines) == 4
    there.line._printed -= _progress.PLAIN_SECONDS
    there.line._look()
    assert len(there.lines) == 5
    there.line.close(ZeroDivisionError())
    assert there.lines[-1].startswith("train ended by ZeroDivisionError after 5 steps in ")
    there.line.close()
    assert len(there.lines) == 6


@pytest.mark.parametrize(
    ("error", "how"), [(None, "ended"), (GeneratorExit(), "ended"), (ValueError("no"), "ended by ValueError")]
)
def test_the_last_line_sums_the_run_up(bench, error, how):
    there = bench()
    for step in (1, 2, 3, 2, 3, 3):
        there.line(event(step, sizes=(25, 24), kernels=1 + step, waited_seconds=step / 2))
    there.line._began -= 100
    there.line.close(error)
    assert there.lines[-1].startswith(f"train {how} after 6 steps (3 of them again, after a restore) in ")
    assert ": step 3, epoch 0.3, loss 3, 3 examples/s, batch" in there.lines[-1]
    assert there.lines[-1].endswith("batch 25 + 24 = 49, 4 kernels compiled, steps waited 1.5 s for a compiler")


def test_a_run_that_ends_before_its_first_step_says_so(bench):
    there = bench()
    there.line.close(KeyboardInterrupt())
    assert there.lines[-1].startswith("train ended by KeyboardInterrupt before its first step, after 0.")


@pytest.mark.parametrize(("rank", "in_reserve"), [(1, False), (0, True)])
def test_a_process_of_another_rank_or_in_reserve_shows_nothing(bench, rank, in_reserve):
    there = bench()
    there.line(event(1))
    before = there.lines
    there.world.rank, there.world.in_reserve = rank, in_reserve
    there.line._printed -= _progress.PLAIN_SECONDS
    there.line._look()
    assert there.lines == before


def test_a_process_that_never_had_rank_0_ends_without_a_line(bench):
    there = bench(rank=1)
    there.line(event(1))
    there.line.close()
    assert there.lines == []


def test_on_a_terminal_there_is_one_line_that_changes(bench):
    there = bench(terminal=True)
    there.line(event(1, epoch_ended=True))
    there.line._look()
    there.line(event(2))
    there.line._look()
    assert "step 1" in there.text.getvalue()
    assert "\r" in there.text.getvalue()
    there.line.close()
    assert "ended after 2 steps" in there.lines[-1]


def test_only_rank_0_shows_progress_and_its_successor_continues(bench):
    there = bench(rank=1)
    there.line(event(1))
    assert there.lines == []
    there.world.rank = 0
    there.line(event(2, epoch_ended=True))
    assert there.lines[-1].startswith("epoch 0.2/3  step 2")


def test_a_line_that_fails_ends_nothing(monkeypatch, caplog):
    monkeypatch.setattr(_progress, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(_progress._Rate, "add", None)
    world = LocalWorld(2)
    line = Progress(COURSE, world, Activity(world), SimpleNamespace(warm=True), Console(file=io.StringIO()))
    assert not _lives(line._thread)
    assert "the progress line failed" in caplog.text
    line(event(1))
    line.close()


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
    assert not [thread for thread in threading.enumerate() if thread.name == "adaptive-progress" and _lives(thread)]


def _lives(thread):
    thread.join(limit(5))
    return thread.is_alive()


def test_examples_per_second_go_by_the_clock():
    rate = _progress._Rate()
    assert rate.per_second is None
    for second in range(10):
        rate.add(second, 100 * second if second < 5 else 500)
    assert rate.per_second == pytest.approx(100 / 5)
    rate = _progress._Rate()
    rate.add(0.0, 0)
    rate.add(20.0, 100)  # a step that takes longer than the window
    assert rate.per_second == 5
