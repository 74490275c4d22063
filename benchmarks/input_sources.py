"""On the same source a step takes at most 1.1 times the time with PyTorch's loader, with as many reader processes.

    python benchmarks/input_sources.py [--rounds 7] [--steps 20] [--processes 2] [--write]

One source waits for 1.5 ms per example (a disk, a network), one computes for 1.5 ms (decoding). One process alternates
between programs of this library and steps by hand (a jitted gradient and update) fed by torch's `DataLoader`. Each
takes some steps while the other is idle. The first steps of a turn use examples fetched before it, and are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

EXAMPLES, FEATURES, BATCH, SECONDS = 20_000, 256, 32, 1.5e-3
LEFT_OUT = 6


class Waits:
    """A source that waits for 1.5 ms per example without using the processor."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        time.sleep(SECONDS)
        return {"x": np.full(FEATURES, index % 7, np.float32)}


class Computes(Waits):
    """A source that computes for 1.5 ms per example."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        until = time.thread_time() + SECONDS
        while time.thread_time() < until:
            pass
        return {"x": np.full(FEATURES, index % 7, np.float32)}


def loss(w: Any, batch: Any) -> Any:
    import jax.numpy as jnp

    return (jnp.tanh(batch["x"] @ w) ** 2).mean()


def with_this_library(source: Any, processes: int) -> tuple[Callable[[int], Any], Callable[[], None]]:
    """Return a function that takes steps, and one that ends it."""
    import jax
    import jax.numpy as jnp

    import adaptive as ad
    import collectives as comm

    def driver(w: jax.Array, batch: Any) -> Any:
        return w - 1e-3 * comm.all_reduce(jax.grad(loss)(w, batch)), {}

    data = ad.data.from_source(source, num_readers=processes)
    program = ad.Program(driver, jnp.eye(FEATURES), data, global_batch=BATCH, resizable=False, world=comm.SoloWorld())
    return lambda steps: [None for _ in program.run(steps=steps)], program.close


def with_torch(source: Any, processes: int) -> tuple[Callable[[int], Any], Callable[[], None]]:
    """Return a function that takes steps of a plain loop, and one that ends it."""
    import jax
    import jax.numpy as jnp
    import torch

    loader = torch.utils.data.DataLoader(
        source,
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=processes,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )

    def batches() -> Any:
        while True:
            for batch in loader:
                yield {name: tensor.numpy() for name, tensor in batch.items()}

    step = jax.jit(lambda w, batch: w - 1e-3 * jax.grad(loss)(w, batch))
    iterator, at = batches(), {"w": jnp.eye(FEATURES)}

    def take(steps: int) -> None:
        for _ in range(steps):
            at["w"] = step(at["w"], next(iterator))
        at["w"].block_until_ready()

    return take, iterator.close


def measure(source: Any, processes: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step by loader, round by round."""
    taking = {"this library": with_this_library(source, processes), "torch": with_torch(source, processes)}
    seconds: dict[str, list[float]] = {name: [] for name in taking}
    for round_ in range(-1, rounds):
        for name in sorted(taking, reverse=bool(round_ % 2)):
            take = taking[name][0]
            take(LEFT_OUT)
            began = time.perf_counter()
            take(steps)
            if round_ >= 0:
                seconds[name].append((time.perf_counter() - began) / steps)
    for _, end in taking.values():
        end()
    return seconds


def main() -> None:
    from _measure import Spread, command_line, readable, report

    args = command_line(__doc__, rounds=7, steps=20, processes=2).parse_args()
    rows = []
    for source in (Waits(), Computes()):
        measured = measure(source, args.processes, args.rounds, args.steps)
        row = {"source": f"{type(source).__name__.lower()} for 1.5 ms"}
        for name, sample in measured.items():
            spread = Spread.of(sample)
            row[name] = f"{readable(spread.median)} ({readable(spread.p10)} – {readable(spread.p90)})"
        ratio = Spread.of(np.asarray(measured["this library"]) / np.asarray(measured["torch"]))
        row["ratio"] = f"{ratio.median:.2f} ({ratio.p10:.2f} – {ratio.p90:.2f})"
        rows.append(row)
        print(row, flush=True)
    notes = [
        f"One process on {os.cpu_count()} cores, batches of {BATCH}, {args.processes} reader processes each; "
        f"{args.rounds} rounds of {args.steps} steps, in turn. Medians with the 10th and 90th percentile; the ratio is "
        f"round by round. Load average {os.getloadavg()[0]:.0f}."
    ]
    report("Steps on the same source, by the loader that reads it", rows, args.write, notes)


if __name__ == "__main__":
    main()
