"""Seconds: read from what the runtime knows, local, and not measured outside it."""

from __future__ import annotations

import numpy as np
import pytest

import monitors as mon

from .lockstep import Lockstep, graph, operators, reading


@pytest.mark.parametrize("name", ["compute_seconds", "iteration_seconds"])
def test_each_worker_reads_its_own(name):
    monitor = getattr(mon, name)
    assert operators(graph(monitor)) == [f"source {name}"]
    known = [reading(**{name: 0.25}), reading(**{name: 0.5}), reading()]
    found = Lockstep(monitor).step([(), (), ()], known)
    np.testing.assert_array_equal(found, np.float32([0.25, 0.5, np.nan]))
    assert found[0].dtype == np.float32
    assert np.isnan(monitor())
