"""Records, replays, simulations, reports, logs, and the doctor."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import adaptive as ad
import collectives as comm
import controllers as ctrl
from controllers.simulate import read_trace, replay
from launchers import command
from tests.mpirun import plain_environment
from tests.speed import limit

from .problem import DATA, START, descend


def adaptive(*arguments: object) -> str:
    """Run the command `adaptive` in this process, and return what it printed."""
    done = CliRunner().invoke(command.adaptive, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def doctor(**environment: str) -> subprocess.CompletedProcess:
    """Run `adaptive doctor` by itself, with these variables alone of a job."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
    line = [sys.executable, "-m", "adaptive", "doctor", "--no-trial"]
    env = {**inherited, **plain_environment(environment)}
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=limit(300))


class Recorded(NamedTuple):
    path: Path
    csv: Path
    reports: list[ad.Report]
    step_seconds: np.ndarray  # that the hook received, by step


@pytest.fixture(scope="module")
def recorded(devices, tmp_path_factory) -> Recorded:
    """A run of 40 steps, of which a policy changes the split, and a schedule the batch."""
    received = []

    def driver(w, batch):
        slowness = jnp.asarray([1e-3, 2e-3, 4e-3], jnp.float64)[ad.worker_index()]
        seconds = comm.all_gather(slowness * ad.batch_size().astype(jnp.float64))
        ctrl.hook(lambda control, seconds: received.append(seconds), seconds, name="watch")
        ctrl.hook(ctrl.schedule({0: 21, 20: 42}))
        ctrl.hook(ctrl.published.lb_bsp(ctrl.published.moving_average()), seconds, every=5)
        return descend(w, batch)

    folder = tmp_path_factory.mktemp("recorded")
    path, rows = folder / "run.jsonl", folder / "run.csv"
    with ad.Program(driver, START, DATA, global_batch=21, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=40, record=path, log=[ad.log.CSV(rows)]))
    return Recorded(path, rows, reports, np.array(received))


def decisions_of(reports: list[ad.Report]) -> list[tuple[int, tuple[float, ...]]]:
    asked = [(report.step, report.decision) for report in reports if report.decision]
    return [(step, decision.shares) for step, decision in asked if decision.shares]


def test_a_replay_makes_the_decisions_of_the_run(recorded):
    run = read_trace(recorded.path)
    hook = next(name for name in run.hooks if "lb_bsp" in name)
    replayed = replay(ctrl.published.lb_bsp(ctrl.published.moving_average()), run, hook=hook)
    assert decisions_of(recorded.reports)
    assert [(step, decision.shares) for step, decision in replayed] == decisions_of(recorded.reports)
    np.testing.assert_array_equal(run.sizes, [report.batch_sizes for report in recorded.reports])


def test_another_policy_sees_the_recorded_values(recorded):
    seen = []

    def update(observation, state):
        seen.append(observation.values[0])
        return None, state

    run = read_trace(recorded.path)
    hook = next(name for name in run.hooks if "watch" in name)
    replay(ctrl.Policy(lambda n_workers: (), update, name="watches"), run, hook=hook)
    np.testing.assert_allclose(np.array(seen), recorded.step_seconds, rtol=1e-6)


def test_the_command_replays_policies_on_a_record(recorded):
    printed = adaptive("replay", recorded.path, "--policy", "equal", "--policy", "balance")
    ratio = {row[0]: float(row[3]) for row in table(printed)}
    assert ratio["balance"] < ratio["equal"]


def table(printed: str) -> list[list[str]]:
    """The rows of a printed table, without its head."""
    rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in printed.splitlines() if "|" in line]
    return [row for row in rows if re.fullmatch(r"[\d.]+", row[3])]


def test_the_command_simulates_policies_on_a_cluster():
    printed = adaptive("simulate", "step_change", "--policy", "equal", "--policy", "balance")
    over_best = {row[0]: float(row[3]) for row in table(printed)}
    assert over_best["balance"] < 1.1 < over_best["equal"]


def test_a_report_is_one_page_that_says_what_changed_and_when(recorded, tmp_path):
    page = tmp_path / "run.html"
    adaptive("report", recorded.path, "-o", page)
    text = page.read_text()
    assert text.lstrip().lower().startswith("<!doctype html")
    assert not re.search(r"""<(script|link|img|iframe)[^>]+(src|href)=["']?https?:""", text)  # loads nothing
    for word in ("schedule", "lb_bsp", "loss", "42"):
        assert word in text
    visible = re.sub(r"(?s)<(script|style).*?</\1>", "", text)
    assert re.search(r"\b20\b|\b21\b", visible)  # the step of the change
    assert "schedule" in visible


def test_a_log_has_a_row_for_each_step(recorded):
    with recorded.csv.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 41))
    losses = [float(report.metrics["loss"]) for report in recorded.reports]
    np.testing.assert_allclose([float(row["loss"]) for row in rows], losses, rtol=1e-6)
    assert [int(float(row["global_batch"])) for row in rows] == [report.global_batch for report in recorded.reports]


def test_a_log_of_ones_own_gets_every_step_and_its_error_does_not_end_the_run():
    class Sink:
        def __init__(self, fails_at: int | None = None):
            self.steps, self.fails_at, self.closed = [], fails_at, False

        def write(self, event):
            if event.report.step == self.fails_at:
                raise OSError("no space left")
            self.steps.append(event.report.step)

        def close(self):
            self.closed = True

    good, bad = Sink(), Sink(fails_at=3)
    with ad.Program(descend, START, DATA, global_batch=12, world=comm.SoloWorld(), resizable=False) as program:
        assert [report.step for report in program.run(steps=6, log=[good, bad])] == [1, 2, 3, 4, 5, 6]
    assert good.steps == [1, 2, 3, 4, 5, 6]
    assert good.closed
    assert bad.steps == [1, 2]


def test_the_doctor_finds_tasks_that_were_not_started():
    """And says what to type."""
    done = doctor(SLURM_JOB_ID="1", SLURM_NTASKS="4")
    assert done.returncode == 1, done.stderr
    assert "adaptive run -n 4" in done.stdout
    assert "adaptive run -n 4" not in doctor().stdout
