"""A program exchanges ResNet-50's gradients, with all checks, in at most 1.05 times the best of raw mpi4py.

    PJRT_NPROC=1 mpirun -n 2 python -m mpi4py benchmarks/exchange_resnet50.py

214 tensors, 97.6 MiB in float32. A program packs small tensors in an XLA function, reduces them in a channel, and
unpacks them in another XLA function. It is compared, on the same JAX arrays, with an Allreduce per tensor, with all of
them in flight as Iallreduce, and with one fused buffer that numpy fills and empties. All alternate in one run, each
rank on a core of its own; reported is the time of the slower rank. A program also checks the results for
infinities and NaNs. This has a row of its own, since the others do not check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from _measure import alternate, command_line, pin, report, summary
from jax.typing import DTypeLike
from mpi4py import MPI

import collectives as comm
from adaptive.base.channel import PartSpec, SentMessage
from adaptive.graph.partition import plan
from adaptive.graph.trace import trace
from adaptive.runtime import message
from adaptive.runtime.finite import FiniteCheck

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """Return the kernels, biases and normalization parameters of ResNet-50 (He et al. 2016, table 1), with biased
    convolutions.
    """

    def convolution(size: int, channels: int, features: int) -> list[Shape]:
        return [(size, size, channels, features), (features,), (features,), (features,)]  # kernel, bias; scale, offset

    shapes, channels = convolution(7, 3, 64), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(1, channels, width) + convolution(3, width, width) + convolution(1, width, 4 * width)
            shapes += convolution(1, channels, 4 * width) if block == 0 else []
            channels = 4 * width
    return [*shapes, (channels, 1000), (1000,)]


def our_way(
    world: comm.MPIWorld, grads: Sequence[jax.Array], looking: bool = False, wire: DTypeLike | None = None
) -> Callable[[], list[jax.Array]]:
    """Return a function that packs, exchanges and unpacks as a program does, and returns the reduced gradients as JAX
    arrays.

    The packing functions do not touch large tensors: a program computes these where they are sent from, and reads them
    where they arrive. `looking` checks the results for infinities and NaNs; `wire` is the format of sums.
    """

    def driver(state: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], dict]:
        return comm.all_reduce([x * batch.sum() for x in state], op="sum", wire=wire), {}

    graph = trace(driver, list(grads), jax.ShapeDtypeStruct((1,), np.float32), capacity=world.capacity)
    layout = message.lay_out(plan(graph).messages[0].contributions, capacity=world.capacity, status=0)
    check = FiniteCheck(layout, "cpu")
    channel = world.channel([PartSpec(p.shape, p.dtype, p.op) for p in layout.parts], 0)  # its own: see `by_piece`
    large = {e.part: i for i, e in enumerate(layout.entries) if e.part and layout.parts[e.part].shape == e.shape}
    packed = [part for part in range(len(layout.parts)) if part not in large]
    small = [i for i, entry in enumerate(layout.entries) if entry.part in packed]

    @jax.jit
    def pack(values: Sequence[jax.Array]) -> list[jax.Array]:
        parts = message.pack(layout, values, [None] * len(values), worker=0, first=1.0)
        return [parts[part] for part in packed]

    @jax.jit
    def unpack(found: Sequence[jax.Array]) -> list[jax.Array]:
        parts = dict(zip(packed, found, strict=True))
        return message.unpack(layout, parts, small, worker=0)

    def exchange() -> list[jax.Array]:
        joined = dict(zip(packed, pack(grads), strict=True))
        parts = [grads[large[part]] if part in large else joined[part] for part in range(len(layout.parts))]
        (results,), _ = channel.exchange(SentMessage([parts], np.zeros(0, np.float32)))
        assert not looking or check.passes(results)
        arrived = unpack([results[part] for part in packed])
        reduced = dict(zip(small, arrived, strict=True)) | {i: results[part] for part, i in large.items()}
        return jax.block_until_ready([reduced[i] for i in range(len(grads))])

    return exchange


def raw_ways(grads: Sequence[jax.Array]) -> dict[str, Callable[[], list[np.ndarray]]]:
    """Return the ways with mpi4py alone: they read JAX arrays in place, and receive into buffers allocated before."""
    world = MPI.COMM_WORLD.Dup()
    received = [np.zeros(g.shape, np.float32) for g in grads]
    ends = np.cumsum([0, *(g.size for g in grads)])
    fused, fused_sum = np.zeros(ends[-1], np.float32), np.zeros(ends[-1], np.float32)

    def each() -> list[np.ndarray]:
        for g, r in zip(grads, received, strict=True):
            world.Allreduce(np.asarray(g), r)
        return received

    def in_flight() -> list[np.ndarray]:
        MPI.Request.Waitall([world.Iallreduce(np.asarray(g), r) for g, r in zip(grads, received, strict=True)])
        return received

    def one_buffer() -> list[np.ndarray]:
        for g, start, end in zip(grads, ends, ends[1:], strict=False):
            fused[start:end] = np.asarray(g).ravel()
        world.Allreduce(fused, fused_sum)
        for r, start, end in zip(received, ends, ends[1:], strict=False):
            r.ravel()[:] = fused_sum[start:end]
        return received

    return {"Allreduce per tensor": each, "Iallreduce, all in flight": in_flight, "fused buffer": one_buffer}


def measure(ways: dict[str, Callable[[], Sequence]], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of the slower rank, round by round."""

    def in_step(way: Callable[[], Sequence]) -> Callable[[], None]:
        def run() -> None:
            way()
            MPI.COMM_WORLD.Barrier()  # so the next starts on all ranks at once

        return run

    own = alternate({name: in_step(way) for name, way in ways.items()}, rounds)
    return {name: np.max(MPI.COMM_WORLD.allgather(seconds), axis=0) for name, seconds in own.items()}


def main() -> None:
    args = command_line(__doc__, rounds=40).parse_args()

    rank, cores = MPI.COMM_WORLD.rank, sorted(os.sched_getaffinity(0))
    pin(cores[rank % len(cores)])

    @jax.jit
    def gradients(x: jax.Array) -> list[jax.Array]:
        return [jnp.full(s, x) + jnp.arange(s[-1]).reshape((1,) * (len(s) - 1) + (-1,)) for s in resnet50()]

    grads = jax.block_until_ready(gradients(1.0 + rank))
    raw = raw_ways(grads)
    with comm.MPIWorld() as world:
        ways = {"ours": our_way(world, grads), "ours, looking for NaNs": our_way(world, grads, looking=True), **raw}
        total = sum(range(1, world.size + 1))
        for way in ways.values():
            for result in way():
                assert np.array_equal(
                    result, np.broadcast_to(total + world.size * np.arange(result.shape[-1]), result.shape)
                )
        seconds = measure(ways, args.rounds)
    best = min(raw, key=lambda name: float(np.median(seconds[name])))
    checked = summary(seconds, best)[1]
    if rank == 0:
        n, mib = len(grads), sum(g.nbytes for g in grads) / 2**20
        report(
            f"Exchanging ResNet-50's gradients and checking them takes {checked.ratio_of_medians:.2f} times the best "
            "of raw mpi4py",
            summary(seconds, best),
            "exchange_resnet50.txt" if args.write else None,
            [
                f"{n} tensors, {mib:.1f} MiB; {world.processes} ranks on one host, one thread each, bound to a core "
                f"each; {MPI.Get_library_version().split(',')[0]}; {args.rounds} rounds.",
                f"Ratios are to the best raw way ({best}).",
            ],
        )


if __name__ == "__main__":
    main()
