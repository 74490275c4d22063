"""Freed memory, which the background compiler returns to the system."""

from __future__ import annotations

import platform
import threading

import numpy as np
import psutil
import pytest

from adaptive.runtime.kernels import background_compiler as _background
from adaptive.runtime.kernels.background_compiler import BackgroundCompiler, StepJob, return_freed_memory
from tests.speed import limit


def resident():
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns memory when asked")
def test_freed_memory_is_returned():
    """Blocks too small to be mapped one by one, with one in use above them."""
    blocks = [np.ones(1 << 14, np.uint8) for _ in range(8192)]
    used = blocks[-1]
    del blocks
    before = resident()
    return_freed_memory()
    assert before - resident() > 64 << 20
    assert used.all()


class Nothing:
    def carry_out(self, job):
        pass


def test_the_background_compiler_returns_memory_when_it_has_no_work(monkeypatch):
    returned = threading.Event()
    monkeypatch.setattr(_background, "_TRIM_AFTER", (0.01,))
    monkeypatch.setattr(_background, "return_freed_memory", returned.set)
    owner = Nothing()
    compiler = BackgroundCompiler(owner)
    compiler.put(StepJob((1,)))
    assert returned.wait(limit(30))
    assert compiler.idle
    compiler.close()
