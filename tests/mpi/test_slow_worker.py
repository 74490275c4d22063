"""On ranks: a worker whose kernels become slow is found, replaced by the reserve, and drained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import run

COVERS = ("controllers/policies/mitigate_slow_workers.py",)

pytestmark = [pytest.mark.ranks, pytest.mark.long]


def test_a_slow_worker_is_replaced_by_the_reserve():
    result = run([Path(__file__).parent / "slow_worker.py"], n=3)
    assert re.search(r"worker 0 takes [\d.]+ times as long as before, since step \d+", result.stdout), result
    assert "of the reserve replaces it" in result.stdout, result
    assert "worker 0 drained: its examples go to the worker that has joined" in result.stdout, result
    assert re.search(r"ended after \d+ with \(0, \d+, \d+\)", result.stdout), result
