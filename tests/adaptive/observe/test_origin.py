"""The origin of a run: process, hosts, versions."""

from __future__ import annotations

import sys
import time

import jax
import psutil

from adaptive.observe.origin import RunOrigin, process_started


def test_the_start_of_the_process_is_that_of_the_kernel():
    assert time.time() - 86400 < process_started() == psutil.Process().create_time() < time.time() + 1


def test_fields_are_json_types():
    fields = RunOrigin(1.0, 2.0, 3.0, ("a", "b"), {"global_batch": 8}).fields()
    assert fields["hosts"] == ["a", "b"]
    assert fields["settings"] == {"global_batch": 8}
    assert fields["versions"]["jax"] == jax.__version__
    assert fields["command"] == sys.argv
