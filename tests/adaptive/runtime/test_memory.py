"""Arrays whose memory is written."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from adaptive.runtime.kernels import background_compiler as _background
from adaptive.runtime.kernels.background_compiler import BackgroundCompiler, SumsJob
from adaptive.runtime.memory import memory_of, return_freed_memory
from tests.speed import limit


@pytest.mark.parametrize("shape", [(), (3,), (2, 300, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_writes_through_the_view_change_the_array(shape, dtype):
    leaf = jax.device_put(jnp.zeros(shape, dtype), may_alias=False)
    memory = memory_of(leaf)
    assert memory.shape == shape
    assert memory.dtype == leaf.dtype
    memory[...] = 1
    np.testing.assert_array_equal(np.asarray(leaf), np.ones(shape, leaf.dtype))
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda x: ~x if dtype == "bool" else -x)(leaf)), ~memory if dtype == "bool" else -memory
    )


@pytest.mark.parametrize("leaf", [jax.random.key(3), jnp.zeros((0, 2))], ids=["keys", "nothing"])
def test_memory_of_its_own(leaf):
    """Keys are no numbers; and where there is nothing, nothing is shared."""
    memory = memory_of(leaf)
    memory[...] = 0
    numbers = np.asarray(jax.random.key_data(leaf) if leaf.ndim == 0 else leaf)
    assert memory.shape == numbers.shape
    assert memory.dtype == numbers.dtype
    assert not np.may_share_memory(memory, numbers)


def resident():
    return psutil.Process().memory_info().rss


def test_freed_memory_is_returned():
    """Blocks too small to be mapped one by one, with one in use above them."""
    blocks = [np.ones(1 << 14, np.uint8) for _ in range(8192)]
    used = blocks[-1]
    del blocks
    before = resident()
    if not return_freed_memory():
        pytest.skip("the C library is not glibc")
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
    compiler.put(SumsJob())
    assert returned.wait(limit(30))
    assert compiler.idle
    compiler.close()
