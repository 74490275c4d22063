"""Tests that several processes run together: each is reported by what it did on all of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ranks
from tests.mpirun import JOBS


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check one test of four, of which a job of two processes has left this."""
    monkeypatch.setenv(JOBS, str(tmp_path))
    jobs, launched = ranks._Jobs(), []
    outcomes = [
        {"a": "passed", "b": "failed", "c": "skipped", "d": "passed"},
        {"a": "passed", "b": "passed", "c": "skipped"},
    ]

    def run(files, n, jax, job):
        launched.append(n)
        for rank, tests in enumerate(outcomes):
            lines = [json.dumps([name, outcome, f"why {name}"]) for name, outcome in tests.items()]
            job.with_suffix(f".of-{rank}").write_text("".join(f"{line}\n" for line in lines))
        return "exit status 0"

    monkeypatch.setattr(ranks, "_run", run)
    session = SimpleNamespace(items=[])
    mark = pytest.mark.on_ranks(2).mark
    for name in "abcd":
        item = SimpleNamespace(path=Path("test_x.py"), nodeid=name, session=session)
        item.get_closest_marker = lambda name: mark
        session.items.append(item)
    yield lambda name: jobs._check(session.items["abcd".index(name)], 2)
    assert launched == [2]  # one job for all
    jobs.threads[0].join()


def test_a_test_passes_fails_and_is_skipped_as_on_its_ranks(check):
    check("a")
    with pytest.raises(pytest.fail.Exception, match="why b"):
        check("b")
    with pytest.raises(pytest.skip.Exception, match="why c"):
        check("c")
    with pytest.raises(pytest.fail.Exception, match="1 of 2 processes came to the end of it: exit status 0"):
        check("d")
