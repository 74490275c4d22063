"""A rank whose reader hangs: the others name the example and the reader's stack, and the job ends with that message."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

import pytest

from tests.mpirun import run
from tests.speed import at_start, slowness

pytestmark = [pytest.mark.ranks, pytest.mark.long]

SCRIPT = Path(__file__).parent / "hanging_reads.py"
READ = r"example \d+ of the data \(by thread adaptive-input, for \d+ s\)"


def start(*arguments):
    """Run a job, patient enough for a slow machine. Returns what it has said."""
    hang_timeout = ceil(2 * max(slowness(), at_start()))
    result = run([SCRIPT, str(hang_timeout), *arguments], n=2, expect_failure=True, timeout=60)
    return result.stderr


@pytest.mark.parametrize(("when", "limit"), [("step", ["1"]), ("build", [])])
def test_the_reader_is_named_and_the_job_ends_with_that_message(when, limit):
    said = start(when, *limit)
    assert re.search(
        r"DataError: rank 1 \(pid .*\) has waited \d+ s, the limit of a read: waiting for " + READ, said
    ), said
    assert "in waits_for_the_disk" in said, said
    where = "in building" if when == "build" else r"in step \d of program 1"
    assert re.search(rf"WorkerError: .*{where}.*DataError: rank 1 .* has waited", said), said  # on rank 0
    assert "The job ends because of rank 1" not in said, said  # before the others' hang_timeout ended


def test_without_a_deadline_the_others_name_the_reader_and_end_the_job():
    said = start("step", "0")
    report = rf"rank 1 \(.*\) is in a step; waiting for {READ}.*\n(.*\n)*?.*in waits_for_the_disk"
    assert re.search(report, said), said
    assert "The job ends because of rank 1" in said, said
