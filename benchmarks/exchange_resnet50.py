"""A program computes and exchanges ResNet-50's gradients in at most 1.05 times the best of raw mpi4py.

    PJRT_NPROC=1 mpirun -n 2 python -m mpi4py benchmarks/exchange_resnet50.py

214 tensors, 97.6 MiB in float32, which a jitted function makes from one number. A step of a program packs small tensors
in an XLA function, reduces all in a channel, checks them for infinities and NaNs, and keeps their mean as its state. It
is compared with the same function and an Allreduce per tensor, with all of them in flight as Iallreduce, and with one
fused buffer that numpy fills and empties, each followed by a jitted function that keeps the means in a donated state.
All alternate in one run, each rank on a core of its own; reported is the time of the slower rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import command_line, pin, report, slowest, summary
from mpi4py import MPI

import adaptive as ad
import collectives as comm

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


@jax.jit
def gradients(x: jax.Array) -> list[jax.Array]:
    """Return tensors of these shapes, which depend on a number."""
    return [jnp.full(s, x) + jnp.arange(s[-1]).reshape((1,) * (len(s) - 1) + (-1,)) for s in resnet50()]


def our_way(world: comm.MPIWorld) -> Callable[[], list[jax.Array]]:
    """Return a function that takes a step of a program, and returns the mean gradients."""

    def driver(state: Any, batch: Any) -> Any:
        return comm.all_reduce(gradients(1.0 + batch.mean())), {}

    zeros = [jnp.zeros(shape) for shape in resnet50()]
    data = np.arange(world.size, dtype=np.float32)
    program = ad.Program(driver, zeros, data, global_batch=world.size, world=world, resizable=False)

    def step() -> list[jax.Array]:
        program.step()
        return jax.block_until_ready(program.state)

    return step


@partial(jax.jit, donate_argnums=0)
def means(state: list[jax.Array], sums: list[jax.Array], count: int) -> list[jax.Array]:
    """Return the means, in the memory of a state."""
    return [total / count for total in sums]


def raw_ways(x: float) -> dict[str, Callable[[], list[jax.Array]]]:
    """Return the ways with mpi4py alone: they read JAX arrays in place, receive into buffers allocated before, and
    return the mean gradients.
    """
    world, shapes = MPI.COMM_WORLD.Dup(), resnet50()
    received = [np.zeros(shape, np.float32) for shape in shapes]
    ends = np.cumsum([0, *(r.size for r in received)])
    fused, fused_sum = np.zeros(ends[-1], np.float32), np.zeros(ends[-1], np.float32)

    def each() -> list[np.ndarray]:
        for g, r in zip(gradients(x), received, strict=True):
            world.Allreduce(np.asarray(g), r)
        return received

    def in_flight() -> list[np.ndarray]:
        sent = list(map(np.asarray, gradients(x)))
        MPI.Request.Waitall([world.Iallreduce(g, r) for g, r in zip(sent, received, strict=True)])
        return received

    def one_buffer() -> list[np.ndarray]:
        for g, start, end in zip(gradients(x), ends, ends[1:], strict=False):
            fused[start:end] = np.asarray(g).ravel()
        world.Allreduce(fused, fused_sum)
        for r, start, end in zip(received, ends, ends[1:], strict=False):
            r.ravel()[:] = fused_sum[start:end]
        return received

    kept = {"state": [jnp.zeros(shape) for shape in shapes]}

    def step(exchange: Callable[[], list[np.ndarray]]) -> list[jax.Array]:
        kept["state"] = jax.block_until_ready(means(kept["state"], exchange(), world.size))
        return kept["state"]

    ways = {"Allreduce per tensor": each, "Iallreduce, all in flight": in_flight, "fused buffer": one_buffer}
    return {name: partial(step, way) for name, way in ways.items()}


def main() -> None:
    args = command_line(__doc__, rounds=40).parse_args()
    rank, cores = MPI.COMM_WORLD.rank, sorted(os.sched_getaffinity(0))
    pin(cores[rank % len(cores)])
    raw = raw_ways(1.0 + rank)
    with comm.MPIWorld() as world:
        ways: dict[str, Callable[[], Any]] = {"ours": our_way(world), **raw}
        for way in ways.values():
            for result, expected in zip(way(), gradients((world.size + 1) / 2), strict=True):
                np.testing.assert_allclose(result, expected, rtol=1e-6)
        seconds = slowest(ways, args.rounds)
    best = min(raw, key=lambda name: float(np.median(seconds[name])))
    rows = summary(seconds, best)
    if rank == 0:
        mib = sum(4 * np.prod(shape) for shape in resnet50()) / 2**20
        report(
            f"A step that exchanges ResNet-50's gradients takes {rows[0].ratio_of_medians:.2f} times the best of raw "
            "mpi4py",
            rows,
            args.write,
            [
                f"{len(resnet50())} tensors, {mib:.1f} MiB; {world.processes} ranks on one host, one thread each, "
                f"bound to a core each; {MPI.Get_library_version().split(',')[0]}; {args.rounds} rounds.",
                f"Ratios are to the best raw way ({best}).",
            ],
        )


if __name__ == "__main__":
    main()
