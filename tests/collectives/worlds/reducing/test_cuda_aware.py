"""Which sums go from device to device; how they go is tested on ranks (on_devices_of_ranks.py)."""

from __future__ import annotations

import ctypes
import subprocess
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from collectives.worlds.reducing import cuda, cuda_aware
from collectives.worlds.reducing.cuda_aware import (
    GROUP_BYTES,
    DeviceAccess,
    agreed,
    groups,
    prepare_context,
    reach,
    says_cuda,
    why_not,
)

COVERS = ("collectives/worlds/reducing/cuda.py",)

F32 = np.dtype("float32")
NVIDIA = SimpleNamespace(platform="gpu", client=SimpleNamespace(platform_version="PJRT C API\ncuda 13000"))


def test_parts_of_one_type_are_packed_together_up_to_a_limit():
    half = GROUP_BYTES // 2
    parts = {1: (half, F32), 3: (half, F32), 4: (8, F32), 7: (8, np.dtype("int32")), 8: (3 * half, F32), 9: (8, F32)}
    assert groups(parts) == [[1, 3], [4], [7], [8], [9]]
    assert groups({}) == []


def test_all_gpus_must_reach_each_other():
    a, b = b"a", b"b"
    assert agreed([DeviceAccess("", a, (a, b)), DeviceAccess("", b, (a, b))], one_host=True) == ""
    assert agreed([DeviceAccess("", a, (a,)), DeviceAccess("", a, (a,))], one_host=True) == ""  # ranks that share one
    assert "rank 0 does not see the GPU of rank 1" in agreed(
        [DeviceAccess("", a, (a,)), DeviceAccess("", b, (b,))], one_host=True
    )
    assert agreed([DeviceAccess(""), DeviceAccess("no")], one_host=True) == "on rank 1 no"
    assert agreed([DeviceAccess("no"), DeviceAccess("no")], one_host=True) == "no"
    assert agreed([DeviceAccess("", a, (a,))] * 2, one_host=False) == "processes are on several hosts"


def test_there_is_a_reason_where_mpi_is_not_to_read_a_device(monkeypatch):
    assert why_not(None, jax.devices("cpu")[0]) == "there is no accelerator"
    assert reach(None, jax.devices("cpu")[0]) == DeviceAccess("there is no accelerator")
    amd = SimpleNamespace(platform="gpu", client=SimpleNamespace(platform_version="PJRT C API\nrocm 60300"))
    assert why_not(None, amd) == "the devices are not NVIDIA GPUs"
    for says, why in (True, ""), (False, "MPI is not CUDA-aware"):
        monkeypatch.setattr(cuda_aware, "says_cuda", lambda mpi, says=says: says)
        assert why_not(None, NVIDIA) == why


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("int MPIX_Query_cuda_support(void) { return 1; }", True),
        ("int MPIX_Query_cuda_support(void) { return 0; }", False),
        ("int MPIX_GPU_query_support(int kind, int *yes) { *yes = kind == 0; return 0; }", True),
        ("int MPIX_GPU_query_support(int kind, int *yes) { *yes = 0; return 0; }", False),
        ("int MPIX_GPU_query_support(int kind, int *yes) { *yes = 1; return 1; }", False),
        ("int MPI_Init(void) { return 0; }", False),
    ],
)
def test_gpu_support_is_read_from_mpi(tmp_path, source, says):
    written = tmp_path / "mpi.c"
    written.write_text(source)
    done = subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "mpi.so", written], check=False)
    if done.returncode:
        pytest.skip("no C compiler")
    assert says_cuda(SimpleNamespace(__file__=str(tmp_path / "mpi.so"))) is says


class Driver:
    """The used part of a driver of two GPUs."""

    def __init__(self):
        self.current = None

    def cuDeviceGetCount(self, count):
        count._obj.value = 2

    def cuDeviceGet(self, handle, number):
        handle._obj.value = 10 + number

    def cuDeviceGetUuid_v2(self, name, handle):
        name.raw = bytes([handle.value]) * 16

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.current

    def cuDevicePrimaryCtxRetain(self, context, handle):
        context._obj.value = 1000 + handle.value

    def cuCtxSetCurrent(self, context):
        assert isinstance(context, ctypes.c_void_p)
        self.current = context.value


@pytest.mark.parametrize(("environ", "number"), [({}, 0), ({"SLURM_LOCALID": "3"}, 1), ({"MPI_LOCALRANKID": "2"}, 0)])
def test_before_mpi_is_loaded_there_is_a_context_on_the_gpu_that_will_be_used(monkeypatch, environ, number):
    current = []
    monkeypatch.setattr(cuda, "make_current", current.append)
    gpus = [SimpleNamespace(**vars(NVIDIA), number=i) for i in range(2)]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    prepare_context(environ=environ)
    prepare_context(gpus[1:], environ=environ)
    assert current == [gpus[number], gpus[1]]
    monkeypatch.undo()
    monkeypatch.setattr(cuda, "make_current", current.append)
    prepare_context(environ=environ)  # of CPUs
    assert len(current) == 2


def test_a_process_announces_its_gpu_and_visible_ones(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_aware, "says_cuda", lambda mpi: True)
    monkeypatch.setattr(cuda, "number", lambda device: 1)
    cuda._context.cache_clear()
    first, second = b"\n" * 16, b"\x0b" * 16
    assert reach(None, NVIDIA) == DeviceAccess("", second, (first, second))
    assert driver.current == 1011  # the context of the GPU that JAX uses
    driver.current = 7
    cuda.make_current(NVIDIA)
    assert driver.current == 7  # the thread has one
    cuda._context.cache_clear()


def test_memory_that_can_be_shared_grows_and_is_given_back(monkeypatch):
    class Memory:
        """Of 100 bytes."""

        def __init__(self):
            self.there, self.count = {}, 0

        def cuMemAlloc_v2(self, address, nbytes):
            if nbytes.value + sum(self.there.values()) > 100:
                return 2
            self.count += 1
            address._obj.value = 1000 * self.count
            self.there[1000 * self.count] = nbytes.value
            return 0

        def cuMemFree_v2(self, address):
            del self.there[address.value]

    driver = Memory()
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    memory = cuda.Shareable()
    assert [memory.room(n) for n in (10, 60, 50)] == [1000, 2000, 2000]
    assert driver.there == {2000: 60}
    assert memory.room(101) == 0
    assert memory.room(40) == 3000
    memory.leave()
    assert memory.room(30) == 4000
    memory.free()
    assert driver.there == {3000: 40}  # what somebody may still write into


@pytest.mark.parametrize(("error", "says", "found"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_whether_other_processes_can_map_memory_of_jax(monkeypatch, error, says, found):
    def attribute(value, which, address):
        value._obj.value = says
        return error

    monkeypatch.setattr(cuda, "_driver", lambda: SimpleNamespace(cuPointerGetAttribute=attribute))
    cuda.can_be_mapped.cache_clear()
    assert cuda.can_be_mapped(jax.devices("cpu")[0]) is found
    cuda.can_be_mapped.cache_clear()
