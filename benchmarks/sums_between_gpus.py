"""With a CUDA-aware MPI, ranks on GPUs sum arrays above some 10 MiB faster from device to device than through the host.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.3 mpirun -n 2 python -m mpi4py benchmarks/sums_between_gpus.py

ResNet-50's gradients and single arrays, in float32. The two ways of an `MPIWorld`, and MPI's own Allreduce on the same
device memory, alternate in one run; reported is the time of the slower rank. Sums of the first two are compared to the
last bit. With `--late`, MPI is initialized before there is a context on the GPU, as when a script imports mpi4py's MPI
before it makes a world. Ranks may share a GPU, and then take turns on it. Without a GPU the script runs on CPU arrays,
and writes no result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from _measure import report, summary

import collectives as comm
from collectives.worlds.reducing import cuda_aware
from collectives.worlds.reducing.cuda_aware import NAMES, DeviceAccess

if "--late" not in sys.argv:
    cuda_aware.prepare_context()  # what a world does before it loads MPI, which the next line imports
from exchange_resnet50 import measure, our_way, resnet50, setting
from mpi4py import MPI

HOST, DEVICES, ALLREDUCE = *NAMES, "MPI's Allreduce on devices' memory"
SIZES = (1, 16, 256)  # MiB, of single arrays


def single(world: comm.MPIWorld, x: jax.Array) -> Callable[[], list[jax.Array]]:
    """Exchange one array."""
    head = jax.device_put(np.zeros(1, np.float32), world.devices[0])

    def exchange() -> list[jax.Array]:
        (results,), _ = world.exchange([[head, x]], ["sum", "sum"], np.zeros(0, np.float32))
        return [results[1]]

    return exchange


def of_mpi(device: jax.Device, arrays: list[jax.Array]) -> Callable[[], list[jax.Array]]:
    """Have MPI sum large arrays in place of the device's memory, into device memory with no other user."""
    world = MPI.COMM_WORLD.Dup()
    large = [x for x in arrays if x.nbytes >= 64 << 10]
    rooms = jax.block_until_ready([jnp.zeros(x.shape, x.dtype, device=device) for x in large])

    def memory(x: jax.Array) -> list:
        return [MPI.buffer.fromaddress(x.unsafe_buffer_pointer(), x.nbytes), x.size, MPI.FLOAT]

    def exchange() -> list[jax.Array]:
        for x, room in zip(large, rooms, strict=True):
            world.Allreduce(memory(x), memory(room))
        return rooms

    return exchange


def compare(name: str, ways: dict[str, Callable[[], list[jax.Array]]], rounds: int) -> list:
    """Check that sums are equal, and time the ways in turn."""
    one, other = (np.concatenate([np.ravel(x) for x in ways[way]()]) for way in (DEVICES, HOST))
    np.testing.assert_array_equal(one, other)
    seconds = measure(ways, rounds)
    return summary({f"{name}, {way}": seconds[way] for way in ways}, f"{name}, {HOST}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--largest", type=int, default=SIZES[-1], help="MiB")
    arguments.add_argument("--late", action="store_true")
    given = arguments.parse_args()

    on_cpu = jax.local_devices()[0].platform == "cpu"
    with setting(cuda_aware, "reach", (lambda *_: DeviceAccess("")) if on_cpu else cuda_aware.reach):
        by_host, by_devices = comm.MPIWorld(), comm.MPIWorld()
    device = by_host.devices[0]
    by_host.transport.cuda_sums.always, by_devices.transport.cuda_sums.always = cuda_aware.HOST, cuda_aware.DEVICES
    rank, rows = by_host.rank, []
    with by_host, by_devices:
        keys = jax.random.split(jax.random.key(rank), len(resnet50()))
        grads = [jax.device_put(jax.random.normal(k, s), device) for k, s in zip(keys, resnet50(), strict=True)]
        jax.block_until_ready(grads)
        mib = sum(x.nbytes for x in grads) / 2**20
        ways = {DEVICES: our_way(by_devices, grads), HOST: our_way(by_host, grads), ALLREDUCE: of_mpi(device, grads)}
        rows += compare(f"ResNet-50, {mib:.0f} MiB", ways, given.rounds)
        for size in SIZES:
            if size <= given.largest:
                x = jax.random.normal(jax.random.key(rank), (size << 18,))
                x = jax.block_until_ready(jax.device_put(x, device))
                ways = {DEVICES: single(by_devices, x), HOST: single(by_host, x), ALLREDUCE: of_mpi(device, [x])}
                rows += compare(f"{size} MiB", ways, given.rounds)
        goes = by_devices.algorithm(0)
        gpus = sorted({own.device for own in by_devices.transport.comm.allgather(by_devices.transport.cuda_sums._own)})
    if rank == 0:
        print(f"large sums go {goes or 'as on GPUs'}", flush=True)
        ratios = ", ".join(f"{row.ratio_of_medians:.2f}" for row in rows[::3])
        report(
            f"From device to device sums of {rows[0].name.split(',')[0]} and of {', '.join(map(str, SIZES))} MiB take "
            f"{ratios} times as long as through the host",
            rows,
            None if on_cpu or goes != DEVICES else f"sums_between_gpus{'_late' * given.late}.md",
            [
                f"{by_host.processes} ranks on {len(gpus)} GPU{'s' * (len(gpus) > 1)} ({device.device_kind}); "
                f"{MPI.Get_library_version().split(',')[0]}, which began {'before' if given.late else 'when'} there "
                f"was a context on the GPU; {given.rounds} rounds.",
                "Ratios: to the way through the host, of the same size. Sums of the first two ways were equal to the "
                "last bit.",
            ],
        )


if __name__ == "__main__":
    main()
