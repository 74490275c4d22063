"""Tests that several processes run together: all of a kind are one job, and each test is reported by its own name.

    pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(3)]             # of mpirun
    pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2, jax=True)]   # that jax.distributed joins

All that are selected of one kind are a job: each of its processes runs pytest on their files, and the tests one after
another. Jobs run in the background from the start of the session, one at a time, and their tests come last in the order
of the suite. A test waits until all processes have run it, and passes if it passes on all. One that fails does not end
the job; those behind it may fail because of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import jaxrun, mpirun
from tests.mpirun import JOBS, STARTED

JOB = "TESTS_JOB"  # in a process of a job: the file with the names of the tests that it runs
ENDED = "ended"  # what a process says of a test after its outcomes
LIMIT = 200.0  # seconds: many tests in one job
PYTEST = ("-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider")


def register(config: pytest.Config) -> None:
    """Have the tests of `on_ranks` run in jobs; or, in a process of a job, those of the job, and no others."""
    if JOB in os.environ:
        config.pluginmanager.register(_Process(Path(os.environ[JOB])))
    elif STARTED not in os.environ:
        config.pluginmanager.register(_Jobs())


def run_suite(files: Sequence[Path | str], n: int, kind: str, *options: str, jax: bool = False) -> int:
    """Run test files on `n` processes, over worlds of a kind; all of them pass, and none is skipped.

    Returns:
      How many tests there were.
    """
    command = [*PYTEST, "-x", *options, *files]
    env = {"TESTS_WORLD": kind}
    if jax:
        results = jaxrun.run(command, n, env=env, timeout=LIMIT)
    else:
        results = [mpirun.run(command, n, env=env, timeout=LIMIT)]
    passed = [number for result in results for number in re.findall(r"(\d+) passed", result.stdout)]
    assert len(passed) == n, results[0]
    assert len(set(passed)) == 1, results[0]
    assert all("skipped" not in result.stdout for result in results), results[0]
    return int(passed[0])


class _Jobs:
    """Runs all tests of a kind in a job, once for all processes of pytest-xdist."""

    def __init__(self) -> None:
        self.is_first = JOBS not in os.environ
        if self.is_first:  # the processes of pytest-xdist inherit it
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps its own for a look
            # Ranks that are killed leave their temporary files, so all processes of the session have theirs here.
            os.environ[JOBS] = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="adaptive-jobs-")
        self.folder = Path(os.environ[JOBS])
        self.threads: list[threading.Thread] = []  # that wait for the jobs which this process has started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if not session.config.option.collectonly:
            for item in session.items:
                if (wanted := _wants(item)) is not None:
                    self._start(item, *wanted)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if session.shouldfail or session.shouldstop or exitstatus == pytest.ExitCode.INTERRUPTED:
            mpirun.STOPPED.set()
        for thread in self.threads:  # another process of pytest-xdist may wait for its job
            thread.join()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        launches = self.folder / "launches"
        count = len(launches.read_text().splitlines()) if launches.exists() else 0
        terminalreporter.write_line(f"{count} jobs of ranks were started")

    def pytest_unconfigure(self) -> None:
        if self.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)
            del os.environ[JOBS]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: _wants(item) is not None)

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        mark = item.get_closest_marker("on_ranks")
        if mark is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        call = pytest.CallInfo.from_call(
            lambda: self._check(item, *mark.args, **mark.kwargs),
            "call",
            reraise=(pytest.exit.Exception, KeyboardInterrupt),
        )
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # The test before this one has kept the folders that both are in: they end here, if the next test is elsewhere.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _check(self, item: pytest.Item, n: int, jax: bool = False) -> None:
        """Fail or skip as the processes of the job do."""
        job = self._start(item, n, jax)
        while True:
            end = _read(job.with_suffix(".ended"))  # first: then all outcomes are there
            outcomes = [outcome for outcome in _outcomes(job) if outcome[0] == item.nodeid]
            ended = [outcome for outcome in outcomes if outcome[1] == ENDED]
            if end is not None or len(ended) == n:
                break
            time.sleep(0.05)
        outcomes = [outcome for outcome in outcomes if outcome[1] != ENDED]
        failures = [text for _, outcome, text in outcomes if outcome == "failed"]
        if failures:
            pytest.fail("\n\n".join(failures), pytrace=False)
        for _, outcome, text in outcomes:
            if outcome == "skipped":
                pytest.skip(text)
        if len(outcomes) != n:
            pytest.fail(f"{len(outcomes)} of {n} processes came to the end of it: {end}", pytrace=False)

    def _start(self, item: pytest.Item, n: int, jax: bool) -> Path:
        """Return the file with the tests of a job; start it if no process of pytest-xdist has."""
        beside = [other for other in item.session.items if _wants(other) == (n, jax)]
        tests = [other.nodeid for other in beside]
        job = self.folder / hashlib.sha256(repr((n, jax, tests)).encode()).hexdigest()[:16]
        with open(job.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not job.exists():
                job.write_text(json.dumps(tests))
                files = list(dict.fromkeys(other.path for other in beside))
                thread = threading.Thread(target=_run_to_end, args=(files, n, jax, job))
                thread.start()
                self.threads.append(thread)
        return job


def _wants(item: pytest.Item) -> tuple[int, bool] | None:
    mark = item.get_closest_marker("on_ranks")
    return None if mark is None else (mark.args[0], mark.kwargs.get("jax", False))


def _read(file: Path) -> str | None:
    return file.read_text() if file.exists() else None


def _outcomes(job: Path) -> list[list[str]]:
    """The name, the outcome and the error of each test that has ended, from each process."""
    lines = [line for path in job.parent.glob(f"{job.name}.of-*") for line in path.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _run_to_end(files: Sequence[Path], n: int, jax: bool, job: Path) -> None:
    """Run a job when no other one runs, and write how it ended."""
    end = "it could not be started"
    try:
        with open(job.with_name("running"), "w") as running:
            fcntl.flock(running, fcntl.LOCK_EX)
            end = _run(files, n, jax, job)
    finally:
        ended = job.with_suffix(".ended-by")
        ended.write_text(end)
        ended.rename(job.with_suffix(".ended"))


def _run(files: Sequence[Path], n: int, jax: bool, job: Path) -> str:
    """Run a job, and return how it ended."""
    env = {JOB: str(job)}
    try:
        if jax:
            return "\n".join(map(str, jaxrun.run([*PYTEST, *files], n, env=env, timeout=LIMIT)))
        return str(mpirun.run([*PYTEST, *files], n, env=env, timeout=LIMIT, expect_failure=None))
    except pytest.fail.Exception as error:  # no end in time
        return str(error)


class _Process:
    """One process of a job. It ends with 0 whatever its tests do, so that it does not end the others."""

    def __init__(self, job: Path):
        self.tests = json.loads(job.read_text())
        self.path = job.with_suffix(f".of-{os.getpid()}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        places = {name: place for place, name in enumerate(self.tests)}
        items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = []
        if report.when == "call" or not report.passed:
            lines.append([report.nodeid, report.outcome, report.longreprtext])
        if report.when == "teardown":
            lines.append([report.nodeid, ENDED, ""])
        with open(self.path, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK
