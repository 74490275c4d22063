"""The bound on microbatches by memory, for kernels of which we say what they need."""

from __future__ import annotations

import jax
import pytest

from adaptive.runtime.kernels import memory_bound
from adaptive.runtime.kernels.memory_bound import MemoryBound, bytes_left, bytes_of, ran_out_of_memory


def bound(left=1000.0):
    notes = []
    return MemoryBound(lambda: left / 0.9, notes.append), notes


def compiled_with(memory, size, fixed=0, per_example=10):
    """Compile smaller and smaller kernels, as `Kernels` does; return the one that fits, and how many were compiled."""
    count = 0
    while True:
        count += 1
        if memory.admit(size, fixed + per_example * size):
            return size, count
        size = memory.largest


@pytest.mark.parametrize(
    ("asked", "fixed", "fits"), [(64, 0, 64), (100, 0, 100), (256, 0, 64), (256, 700, 16), (7, 990, 1)]
)
def test_the_largest_power_of_two_that_fits_is_found(asked, fixed, fits):
    memory, notes = bound()
    found, count = compiled_with(memory, asked, fixed)
    assert found == fits
    assert memory.largest == (None if found == asked else fits)
    assert len(notes) == count - 1 <= 3
    assert all(memory.allows(size) for size in (1, fits))
    assert memory.allows(2 * fits) == (found == asked)


def test_a_single_example_and_a_kernel_of_unknown_memory_are_always_tried():
    memory, notes = bound()
    assert memory.admit(1, 5000)
    assert memory.admit(256, None)
    assert (memory.largest, notes) == (None, [])


def test_running_out_of_memory_halves_the_bound():
    memory, notes = bound()
    assert memory.admit(100, 1000)
    assert memory.refuse(100, "no room")
    assert memory.largest == 32  # a power of two up to 50
    assert "at most 32 examples in one microbatch: 100 ran out of memory: no room" in notes[0]
    assert memory.refuse(32, "no room")
    assert memory.largest == 16
    assert not memory.refuse(1, "no room")
    assert "at most 16" in memory.in_words


def test_memory_is_asked_for_once():
    calls = []
    memory = MemoryBound(lambda: calls.append(0) or 1e9, lambda text: None)
    memory.admit(2, 10)
    memory.admit(4, 20)
    assert len(calls) == 1


class Device:
    def __init__(self, platform="gpu", stats=None):
        self.platform, self._stats = platform, stats

    def memory_stats(self):
        return self._stats


def test_workers_of_a_device_and_processes_of_a_host_share_free_memory(monkeypatch):
    gpu = Device(stats={"bytes_limit": 100, "bytes_in_use": 40})
    assert bytes_left([gpu], 8) == 60
    assert bytes_left([gpu, gpu, Device()], 1) == 30
    monkeypatch.setattr(memory_bound, "MemoryLeft", lambda: lambda: 120)
    assert bytes_left([Device("cpu")] * 2, 3) == 20
    assert bytes_left([Device("tpu")], 1) == float("inf")
    of_cuda = Device(stats={"bytes_limit": 0, "bytes_in_use": 40})  # XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async
    assert bytes_left([of_cuda], 1) == float("inf")


def test_a_program_needs_its_temporaries_and_two_sets_of_results():
    x = jax.ShapeDtypeStruct((1000,), "float32")
    program = jax.jit(lambda x: x + 1).lower(x).compile()
    assert bytes_of([program, program], 7) >= 2 * 2 * 4000 + 7
    assert bytes_of([program, object()], 7) is None


def test_only_xla_s_own_words_are_taken_for_a_lack_of_memory():
    assert ran_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    dispatched = "INTERNAL: Error dispatching computation: Out of memory allocating 3584000224 bytes."
    assert ran_out_of_memory(jax.errors.JaxRuntimeError(dispatched))
    tried = "NOT_FOUND: All configs failed during profiling.\nEXECUTION FAILED: RESOURCE_EXHAUSTED: Out of memory"
    assert ran_out_of_memory(jax.errors.JaxRuntimeError(tried))
    assert ran_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"))
    assert not ran_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: broken"))
    assert not ran_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))
