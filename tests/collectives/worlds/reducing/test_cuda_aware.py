"""Which sums go from device to device; how they go is tested on ranks (on_devices_of_ranks.py)."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from adaptive.base.reductions import Sliced
from collectives.worlds.reducing import cuda, cuda_aware
from collectives.worlds.reducing.algorithms import LARGE_BYTES
from collectives.worlds.reducing.cuda_aware import (
    DEVICES,
    GROUP_BYTES,
    HOST,
    CudaAwareSums,
    DeviceAccess,
    agreed,
    groups,
    prepare_context,
    reach,
    says_cuda,
    why_not,
)
from collectives.worlds.transport.operations import ReduceMessage
from collectives.worlds.transport.process_group import ProcessGroup
from tests.collectives.worlds.mpi_of_threads import MPI, Job, MPIError, processes

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


# --- sums of processes that are threads, whose memory MPI reaches -----------------------------------------------------


@pytest.fixture
def reached(monkeypatch):
    """Whether MPI reaches devices, and JAX's memory can be mapped."""
    monkeypatch.setattr(cuda_aware, "reach", lambda mpi, device: DeviceAccess(""))
    monkeypatch.setattr(cuda, "make_current", lambda device: None)
    monkeypatch.setattr(cuda, "can_be_mapped", lambda device: True)


def sums_of(comm, device=None, hosts=None, always=None):
    sums = CudaAwareSums(MPI, device or jax.local_devices()[0])
    sums.set_group(ProcessGroup(comm, processes(*(hosts or [0] * comm.size))))
    sums.always = always
    return sums


def send(sums, parts, ops, *, key=("a channel", 1), large=True, fixed=False):
    """Send a message. Returns the numbers of the parts that went from device to device, and whether it is agreed."""
    message = ReduceMessage("m", "", 7, buffers=[], status=np.zeros(1), reduce=lambda: np.full(1, len(sums.results)))
    sums.begin_message(message, key, parts, ops, large=large, fixed=fixed)
    message.carry_out(None)
    results = dict(sums.results)
    assert message.arrived == len(results)
    sums.end_message()
    assert not sums.results
    return results, message.agreed


N = LARGE_BYTES // 4
SHAPES = [((N,), F32), ((N + 5,), F32), ((3, N), F32), ((N,), np.int32), ((N - 1,), F32), ((N,), F32)]
OPS = ["sum"] * 5 + ["max"]


def values(rank):
    rng = np.random.default_rng(rank)
    return [(100 * rng.normal(size=shape)).astype(dtype) for shape, dtype in SHAPES]


@pytest.mark.parametrize(("size", "at_a_time"), [(2, 1 << 30), (3, 50_000)])
@pytest.mark.usefixtures("reached")
def test_large_sums_from_device_to_device_are_the_same_everywhere(size, at_a_time, monkeypatch):
    """Not of part 0, small parts, or extremes."""
    monkeypatch.setattr(cuda_aware, "_AT_A_TIME", at_a_time)

    def use(comm):
        results, agreed = send(sums_of(comm, always=DEVICES), [jax.device_put(x) for x in values(comm.rank)], OPS)
        assert agreed
        return {j: np.asarray(x) for j, x in results.items()}

    first, *others = Job(size).run(use)
    assert list(first) == [1, 2, 3]
    for j, got in first.items():
        rows = [values(rank)[j] for rank in range(size)]
        expected = rows[0]
        for row in rows[1:]:
            expected = expected + row  # in the order of ranks
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(got, expected)
        assert [other[j].tobytes() for other in others] == [got.tobytes()] * (size - 1)


@pytest.mark.usefixtures("reached")
def test_routes_are_measured_in_turn_and_the_faster_one_is_taken(monkeypatch):
    """From device to device takes a third of the time here."""
    clock = threading.local()
    monkeypatch.setattr(cuda_aware, "perf_counter", lambda: clock.now)
    sum_up = CudaAwareSums._carry_out

    def timed(sums, *arguments):
        arrived = sum_up(sums, *arguments)
        clock.now += 1.0 if sums.results else 3.0
        return arrived

    monkeypatch.setattr(CudaAwareSums, "_carry_out", timed)

    def use(comm):
        clock.now = 0.0
        sums = sums_of(comm)
        parts = [jax.device_put(x) for x in values(comm.rank)]
        taken = [bool(send(sums, parts, OPS)[0]) for _ in range(9)]
        assert sums.stays(parts, OPS, "another") == [1, 2, 3]
        assert sums.stays(parts, OPS, "a channel") == [1, 2, 3]
        return taken

    assert Job(2).run(use) == [[False, True] * 3 + [True] * 3] * 2


@pytest.mark.parametrize(
    ("hosts", "always", "fixed", "says", "stays"),
    [
        ([0, 0], None, False, "through the host and from device to device in turn, to measure which is faster", []),
        ([0, 1], None, False, "through the host: processes are on several hosts", []),
        ([0, 0], HOST, False, "through the host", []),
        ([0, 0], None, True, "through the host, not measured: in a deterministic program", []),
    ],
)
@pytest.mark.usefixtures("reached")
def test_a_channel_says_which_way_its_sums_go(hosts, always, fixed, says, stays):
    parts = [np.zeros(1, F32), np.zeros(N, F32)]

    def use(comm):
        sums = sums_of(comm, NVIDIA, hosts, always)
        assert not sums.through_host
        assert sums.describe("a channel") == ""
        results, agreed = send(sums, parts, ["sum", "sum"], fixed=fixed)
        assert (results, agreed) == ({}, False)
        assert sums.through_host is (hosts == [0, 1])
        assert sums.describe("another") == ""
        if not says.endswith("faster"):
            assert sums.stays(parts, ["sum", "sum"], "a channel") == stays
        else:
            assert sums.stays(parts, ["sum", "sum"], "a channel") == [1]  # in its next message
        sums.always = DEVICES
        if hosts == [0, 0]:
            assert sums.describe("a channel") == "from device to device"
        sums.always = always
        return sums.describe("a channel")

    assert Job(2).run(use) == [says] * 2


@pytest.mark.usefixtures("reached")
def test_messages_without_large_sums_or_of_one_process_agree_nothing():
    def use(comm):
        sums = sums_of(comm, NVIDIA)
        send(sums, [np.zeros(1, F32)] * 2, ["sum", "sum"], large=False)
        if comm.size == 1:
            send(sums, [np.zeros(N, F32)] * 2, ["sum", "sum"])
        return comm.calls[False], sums.describe("a channel")

    for size in (1, 2):
        assert Job(size).run(use) == [(0, "")] * size


@pytest.mark.usefixtures("reached")
def test_few_channels_are_remembered(monkeypatch):
    monkeypatch.setattr(cuda_aware, "KEPT", 2)

    def use(comm):
        sums = sums_of(comm, NVIDIA, always=HOST)
        for channel in "abcab":
            send(sums, [np.zeros(1, F32), np.zeros(N, F32)], ["sum", "sum"], key=(channel, 1))
        return [bool(sums.describe(channel)) for channel in "abc"]

    assert Job(2).run(use) == [[True, True, False]] * 2


@pytest.mark.usefixtures("reached")
def test_memory_is_kept_while_mpi_may_write_to_it_and_shareable_memory_is_left(monkeypatch):
    """After an error, until the requests are over."""

    class Unfinished:
        over = False

        def __init__(self, *_):
            made.append(self)

        def Wait(self):
            raise MPIError

        def Test(self):
            raise MPIError

        def __bool__(self):
            return not self.over

    made, left, freed = [], [], []
    shareable = SimpleNamespace(room=lambda n: 0, leave=lambda: left.append(1), free=lambda: freed.append(1))
    monkeypatch.setattr(cuda, "is_nvidia", lambda device: True)
    monkeypatch.setattr(cuda, "can_be_mapped", lambda device: False)
    monkeypatch.setattr(cuda, "Shareable", lambda: shareable)

    def use(comm):
        comm.size, comm.Isend, comm.Irecv, comm.allgather = 2, Unfinished, Unfinished, lambda own: [own] * 2
        sums = sums_of(comm, always=DEVICES, hosts=[0, 0])
        parts = [jax.device_put(x) for x in values(0)[:2]]
        for _ in range(2):
            with pytest.raises(MPIError):
                send(sums, parts, OPS)
        assert left == [1]  # before the second one
        sums.close()
        assert not freed
        Unfinished.over = True
        with pytest.raises(MPIError):
            send(sums, parts, OPS)
        assert left == [1]
        sums.close()
        return freed

    assert Job(1).run(use) == [[1]]


def test_sums_of_other_kinds_stay_on_the_host():
    op = type("Other", (Sliced,), {})()

    def use(comm):
        parts = [np.zeros(1, F32), np.zeros(N, F32), np.zeros(N, F32)]
        sums = sums_of(comm)  # which MPI does not reach
        return sums.stays(parts, ["sum", "sum", op], "a channel"), send(sums, parts, ["sum", "sum", op])

    assert Job(2).run(use) == [([], ({}, False))] * 2
