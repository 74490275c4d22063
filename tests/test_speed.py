"""Limits in seconds: they grow with how slow the machine is, and only those of `tests.speed` are used."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tests import cost, speed
from tests.mpirun import ROOT

# Seconds that are waited for, as a number beside the name of a limit. A job of `tests.mpirun` scales its own.
_WAITS = re.compile(
    r"\btimeout=[1-9]|\.(?:wait|result|settimeout|poll)\([1-9]|(?:thread|child|reader|other)\.join\([1-9]"
)
_JOB = re.compile(r"(?<![.\w])(?:mpirun\.|jaxrun\.)?run\(")


@pytest.fixture
def machine(monkeypatch):
    """A machine of a given speed, and its clock."""
    found = SimpleNamespace(slow=1.0, now=0.0)
    monkeypatch.setenv(speed.SLOWNESS, "1.0")
    monkeypatch.setattr(speed, "slowness", lambda: found.slow)
    monkeypatch.setattr(speed, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(speed, "recent_slowness", lambda: found.slow)
    return found


def test_a_deadline_moves_while_the_machine_is_slower_than_it_was(machine):
    deadline = speed.Deadline(10)
    first = deadline.limit
    machine.now, machine.slow = first, 4.0
    assert deadline.left() == 3 * first
    machine.now = 4 * first
    assert deadline.left() == 0
    machine.slow = 2.0  # earlier than it was: the limit never shrinks
    assert deadline.limit == 4 * first


@pytest.mark.parametrize(
    ("used", "compiling", "marks", "fails"),
    [
        (2.9, 0, (), False),
        (3.1, 0, (), True),
        (9, 8, (), False),
        (9, 0, ("seconds",), False),
    ],
)
def test_a_test_that_takes_much_of_the_processor_fails(monkeypatch, used, compiling, marks, fails):
    monkeypatch.setattr(speed, "processor_slowness", lambda: 1.0)
    held = cost.Cost(iter([0.0, used]).__next__)
    call = held.pytest_runtest_call(
        SimpleNamespace(get_closest_marker=lambda name: SimpleNamespace(args=(4,)) if name in marks else None)
    )
    next(call)
    held.add("/jax/core/compile/backend_compile_duration", compiling)
    with pytest.raises(pytest.fail.Exception if fails else StopIteration):
        call.send("done")


def test_no_limit_is_a_plain_number_of_seconds():
    fixed = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition("#")[0]
            if _WAITS.search(code) and not (_JOB.search(code) and "subprocess" not in code):
                fixed.append(f"{path.relative_to(ROOT)}:{number}: {code.strip()}")
    assert fixed == [], "write limit(seconds), of tests.speed"
