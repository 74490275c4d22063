"""A writer that is killed at any moment leaves complete checkpoints, and the next one goes on from the newest."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from adaptive.disk.folders import checkpoints, read


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.long)])
def test_a_writer_that_is_killed_at_any_moment(tmp_path, kills):
    """Of the checkpoints in a run, and of the last one at its end, in turn."""
    moments, newest = np.random.default_rng(kills).uniform(0, 0.6, kills), 0
    script = Path(__file__).with_name("endless_writer.py")
    for number, moment in enumerate(moments):
        every = "1" if number % 2 else "1000000"
        job = subprocess.Popen([sys.executable, script, tmp_path, every], stdout=subprocess.PIPE, text=True)
        try:
            assert job.stdout.readline() == "ready\n"
            time.sleep(moment)
        finally:
            job.kill()
            job.communicate()
        kept = read(checkpoints(tmp_path)[0])  # the newest is complete
        assert kept["step"] > newest
        newest = int(kept["step"])
        assert kept["cursor"] == 4 * newest
        np.testing.assert_array_equal(kept["state"], np.full(1 << 18, newest, np.float32))
    assert newest >= kills
    assert len(checkpoints(tmp_path)) <= 3  # one may have been about to be deleted
