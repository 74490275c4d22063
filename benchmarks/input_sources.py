"""On the same source a step takes at most 1.05 times the time with the better of PyTorch's and grain's loaders.

That is with 0, 1 and 2 reader processes, and in memory that does not grow with the data.

    python benchmarks/input_sources.py [--rounds 5] [--sources sleeps computes …] [--processes 0 1 2]

Starts jobs of two ranks. Each job alternates between programs of this library and steps by hand (a jitted gradient, one
Allreduce of mpi4py, a jitted update) that are fed by `torch.utils.data.DataLoader` and by grain's `IterDataset`. Each
takes some steps while the others are idle. The first steps of a turn use examples fetched before it, and are left out.
Loaders have their defaults: grain reads with 16 threads in each process, and PyTorch in the training thread if there
are no processes. This library takes arrays and files as they are, the others a data set that reads their rows.

Memory is the maximum of the unique set size (USS) of a rank and its readers, in separate jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _sources import EXAMPLES, SOURCES, source, write

LOCAL_BATCH, WIDTH, LAYERS = 32, 256, 2
LEFT_OUT, STEPS = 36, 20  # grain's readers hold 500 examples each
LOADERS = ("this library", "torch", "grain")


# --- what is trained --------------------------------------------------------------------------------------------------


def loss(w: Any, batch: Any) -> Any:
    import jax.numpy as jnp

    x = batch["x"].reshape(len(batch["x"]), WIDTH, -1).astype(jnp.float32).mean(-1)
    for _ in range(LAYERS):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def with_this_library(data: Any, processes: int) -> tuple[Callable[[int], Any], Callable[[], None]]:
    """Return a function that takes steps, and one that ends it."""
    import jax
    import jax.numpy as jnp

    import adaptive as ad
    import collectives as comm

    def driver(w: jax.Array, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, batch)
        gradient, value = comm.all_reduce((gradient, value))
        return w - 1e-3 * gradient, {"loss": value}

    if processes:
        data = ad.data.from_source(data, num_readers=processes)
    program = ad.Program(driver, jnp.eye(WIDTH) / 2, data, global_batch=LOCAL_BATCH * ad.num_workers(), resizable=False)
    return lambda steps: [None for _ in program.run(steps=steps)], program.close


def by_hand(batches: Iterator[Any]) -> Callable[[int], Any]:
    """The same step of a plain loop."""
    import jax
    import jax.numpy as jnp
    from mpi4py import MPI

    ranks, at = MPI.COMM_WORLD, {"w": jnp.eye(WIDTH) / 2}

    @jax.jit
    def gradient(w: jax.Array, batch: Any) -> jax.Array:
        value, found = jax.value_and_grad(loss)(w, batch)
        return jnp.append(found.reshape(-1), value)

    @jax.jit
    def update(w: jax.Array, total: Any) -> jax.Array:
        return w - 1e-3 * (total[:-1] / ranks.size).reshape(w.shape)

    def take(steps: int) -> None:
        for _ in range(steps):
            batch = next(batches)
            total = np.array(gradient(at["w"], batch))
            ranks.Allreduce(MPI.IN_PLACE, total)
            at["w"] = update(at["w"], total)
        at["w"].block_until_ready()

    return take


def with_torch(data: Any, processes: int, rank: int, ranks: int) -> tuple[Callable[[int], Any], Callable[[], None]]:
    import torch

    torch.set_num_threads(1)
    mine = torch.utils.data.Subset(data, range(rank, len(data), ranks))
    several = {"multiprocessing_context": "spawn", "persistent_workers": True} if processes else {}
    options = {"shuffle": True, "drop_last": True, "num_workers": processes, **several}
    loader = torch.utils.data.DataLoader(mine, LOCAL_BATCH, **options)

    def batches() -> Iterator[Any]:
        while True:
            for batch in loader:
                yield {name: tensor.numpy() for name, tensor in batch.items()}

    iterator = batches()
    return by_hand(iterator), iterator.close


def with_grain(data: Any, processes: int, rank: int, ranks: int) -> tuple[Callable[[int], Any], Callable[[], None]]:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    mine = grain.MapDataset.source(data).shuffle(seed=0)[rank::ranks].repeat()
    dataset = mine.to_iter_dataset().batch(LOCAL_BATCH)
    if processes:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes))
    iterator = iter(dataset)
    return by_hand(iterator), getattr(iterator, "close", lambda: None)


def started(loader: str, name: str, processes: int, folder: Path, rank: int, ranks: int) -> Any:
    """Return a function that takes steps fed by a loader, and one that ends it."""
    data_set, as_it_is = source(name, folder)
    if loader == "this library":
        return with_this_library(as_it_is, processes)
    return (with_torch if loader == "torch" else with_grain)(data_set, processes, rank, ranks)


# --- one job ----------------------------------------------------------------------------------------------------------


def measure(name: str, processes: int, rounds: int, folder: Path, loaders: list[str]) -> dict[str, Any]:
    """Return for each loader the seconds of a step, round by round; for one loader alone, its memory."""
    import psutil
    from mpi4py import MPI

    import collectives as comm

    with comm.world() as world:
        ranks = MPI.COMM_WORLD
        taking = {loader: started(loader, name, processes, folder, world.rank, world.size) for loader in loaders}
        seconds: dict[str, list[float]] = {loader: [] for loader in loaders}
        memory = [0]
        for round_ in range(-1, rounds):
            for i in range(len(loaders)):
                loader = loaders[(round_ + i) % len(loaders)]
                take = taking[loader][0]
                ranks.Barrier()
                take(LEFT_OUT)
                ranks.Barrier()
                began = time.perf_counter()
                take(STEPS)
                ranks.Barrier()
                if round_ >= 0:
                    seconds[loader].append((time.perf_counter() - began) / STEPS)
                family = [psutil.Process(), *psutil.Process().children(recursive=True)]
                memory.append(sum(process.memory_full_info().uss for process in family))
                time.sleep(1.0)  # until its readers have filled what they fill
        for _, end in taking.values():
            end()
        return {"seconds": seconds, "memory": max(memory), "rank": world.rank}


# --- all of them ------------------------------------------------------------------------------------------------------


def job(name: str, processes: int, rounds: int, folder: Path, loaders: tuple[str, ...]) -> dict[str, Any]:
    """Return what rank 0 of a job of two ranks measured."""
    out = folder / "measured.json"
    environment = {**os.environ, "PJRT_NPROC": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    options = ["--job", name, "--processes", str(processes), "--rounds", str(rounds), "--folder", str(folder)]
    mpirun = Path(sys.executable).with_name("mpirun")
    launch = [str(mpirun) if mpirun.exists() else "mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    command = [*launch, sys.executable, __file__, *options]
    subprocess.run([*command, "--loaders", *loaders], env=environment, check=True, timeout=900)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sources", nargs="+", default=["sleeps", "computes in", "images", "HDF5", "mapped"])
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loaders", nargs="+", default=list(LOADERS))
    args = parser.parse_args()
    if args.job:
        measured = measure(args.job, args.processes[0], args.rounds, args.folder, args.loaders)
        if not measured.pop("rank"):
            (args.folder / "measured.json").write_text(json.dumps(measured))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for name in SOURCES:
            if not any(part in name for part in args.sources):
                continue
            for processes in args.processes:
                measured = job(name, processes, args.rounds, Path(folder), tuple(args.loaders))["seconds"]
                memory = {}
                if not args.no_memory:
                    memory = {of: job(name, processes, 1, Path(folder), (of,))["memory"] for of in args.loaders}
                rows.append(row(name, processes, measured, memory))
                print(rows[-1], flush=True)
    say(rows, args.rounds, args.write)


def row(name: str, processes: int, measured: dict[str, list[float]], memory: dict[str, int]) -> dict[str, str]:
    """Return a row of the table."""
    from _measure import Spread, readable

    cells = {"source": name, "processes": str(processes)}
    for loader, sample in measured.items():
        spread = Spread.of(sample)
        cells[loader] = f"{readable(spread.median)} ({readable(spread.p10)} – {readable(spread.p90)})"
    others = [np.asarray(sample) for loader, sample in measured.items() if loader != LOADERS[0]]
    if LOADERS[0] in measured and others:
        best = min(others, key=lambda sample: float(np.median(sample)))
        ratio = Spread.of(np.asarray(measured[LOADERS[0]]) / best)
        cells["of the best"] = f"{ratio.median:.2f} ({ratio.p10:.2f} – {ratio.p90:.2f})"
    if memory:
        cells["memory, MB"] = " / ".join(f"{memory[loader] / 1e6:.0f}" for loader in memory)
    return cells


def say(rows: list[dict[str, str]], rounds: int, keep: bool) -> None:
    from _measure import report

    notes = [
        f"2 ranks on {os.cpu_count()} cores, batches of {LOCAL_BATCH} each, {EXAMPLES} examples; {rounds} rounds of "
        f"{STEPS} steps each, in turn in one job. Medians with the 10th and 90th percentile; the ratio is round by "
        "round. Memory: of a rank and its readers, this library's / PyTorch's / grain's. "
        f"Load average {os.getloadavg()[0]:.0f}."
    ]
    report("Steps on the same source, by the loader that reads it", rows, "input_sources.md" if keep else None, notes)


if __name__ == "__main__":
    main()
