"""Claim: between hosts, stages of the backward pass hide some of what can be hidden of an exchange (aimed at: 70 %).

    python benchmarks/overlap_between_hosts.py

Two hosts are network namespaces, with a link of 1 Gbit/s between them, which takes Linux and root. Each rank has one
core, on which XLA's one thread and MPI's waiting take turns. A chain of layers has parameters of ResNet-50's shapes, so
that 97.6 MiB of gradients are sent, and a batch so large that the backward pass takes about as long as the exchange.
Two programs of that driver, one whole and one in stages, take steps in alternation.

What can be hidden is the lesser of two: what is computed behind the first stage, and what is exchanged before the last
message. The first is measured on stages that send nothing, by a world of one worker; the second is the exchange of the
whole program, by the share of bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from _measure import RESULTS, Spread, pin, readable, report

import adaptive as ad
import collectives as comm

Params = list[jax.Array]
RATE = "1gbit"
SHARED = (
    "Each rank has one core, on which XLA's thread and MPI's waiting, which spins, take turns: beside an exchange both "
    "take longer (computing, whole and in stages), which is what keeps the rest from being hidden. On one host an "
    "exchange is copying by the same cores. The machine was shared with other work."
)
_tensors = 0  # the last so many; 0 for all


def shapes() -> list[tuple[int, ...]]:
    from exchange_resnet50 import resnet50  # imports MPI

    return resnet50()[-_tensors:]


def loss(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
    """A chain of products with all kernels, each behind a scale and an offset where it has some. Widths are fitted."""
    x = batch["x"]
    for p in params:
        if p.ndim == 1:
            x = x * (1 + p)[None] if p.shape[0] == x.shape[1] else x
            continue
        kernel = p.reshape(-1, p.shape[-1])
        x = jnp.tile(x, (1, -(-kernel.shape[0] // x.shape[1])))[:, : kernel.shape[0]]
        x = jnp.tanh(x @ kernel)
    return jnp.square(x).mean()


def driver(params: Params, batch: Mapping[str, jax.Array]) -> tuple[Params, dict[str, jax.Array]]:
    value, grads = jax.value_and_grad(loss)(params, batch)
    grads = comm.all_reduce(grads)
    return [p - 0.01 * g for p, g in zip(params, grads, strict=True)], {"loss": comm.all_reduce(value)}


def built(world: Any, examples: int, overlap: bool | int | Literal["auto"]) -> ad.Program:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=s, scale=0.02).astype(np.float32)) for s in shapes()]
    data = {"x": rng.normal(size=(4 * examples * world.size, 64)).astype(np.float32)}
    options: dict[str, Any] = {"global_batch": examples * world.size, "resizable": False, "nonfinite": "raise"}
    return ad.Program(driver, params, data, world=world, overlap=overlap, **options)


def ends_of_stages(examples: int, stages: int) -> list[float]:
    """When each stage is done, in seconds, where nothing is sent."""
    with comm.SoloWorld() as world, built(world, examples, stages) as program, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        program.step()
        program.trace(path, steps=5)
        for _ in range(6):
            program.step()
        events = json.loads(path.read_text())["traceEvents"]
    spans = [
        [e["dur"] / 1e6 for e in events if e["ph"] == "X" and f"stage {n + 1} of" in e["name"]] for n in range(stages)
    ]
    return list(np.cumsum([float(np.median(s)) for s in spans]))


def fitted(world: Any) -> int:
    """A batch for which the backward pass, two thirds of what is computed, takes about as long as the exchange."""
    examples = 128  # where it has not to be fitted twice
    for _ in range(2):
        with built(world, examples, False) as program:
            program.step()
            seen = [program.step() for _ in range(3)]
        computing = min(max(r.compute_seconds) for r in seen)
        exchanging = min(r.breakdown.exchanging for r in seen)
        wanted = int(world.all_gather_bytes(str(round(examples * 1.5 * exchanging / computing)).encode())[0])
        if 0.7 < wanted / examples < 1.4:
            break
        examples = max(8, min(320, wanted))
    return examples


def on_rank(rounds: int, stages: int | Literal["auto"]) -> None:
    with comm.MPIWorld() as world:
        pin(sorted(os.sched_getaffinity(0))[world.rank % 2])
        examples = fitted(world)
        programs = {"whole": built(world, examples, False), "in stages": built(world, examples, stages)}
        decided = next(line for line in programs["in stages"].explain().splitlines() if line.startswith("overlap"))
        seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in programs}
        for n in range(-2, rounds):
            for name in sorted(programs, reverse=bool(n % 2)):
                world.barrier()
                began = time.perf_counter()
                told = programs[name].step()
                jax.block_until_ready(programs[name]._engine.states[0])
                seconds = time.perf_counter() - began
                if n >= 0:
                    seen[name].append((seconds, max(told.compute_seconds), told.breakdown.exchanging))
        cut = programs["in stages"]
        layouts = [layout.nbytes for layout in cut._engine.layouts]
        states = [p.state for p in programs.values()]
        apart = max(float(jnp.abs(a - b).max()) for a, b in zip(*states, strict=True))
        for program in programs.values():
            program.close()
        ends = ends_of_stages(examples, len(layouts))
        everyone = [json.loads(row) for row in world.all_gather_bytes(json.dumps(seen).encode())]
        slowest = {name: np.max([own[name] for own in everyone], axis=0).tolist() for name in programs}
        if world.rank == 0:
            print("RESULT " + json.dumps([examples, layouts, ends, slowest, decided, apart]), flush=True)


def start(rounds: int, stages: str, several: bool) -> list:
    """The result of two ranks, on two hosts or on one."""
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    from tests import mpirun
    from tests.hosts import hosts

    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, **mpirun._DEFAULTS, "PYTHONPATH": path}
    own = [sys.executable, "-m", "mpi4py", __file__, "--rank", "--rounds", str(rounds), "--stages", stages]
    own += ["--tensors", str(_tensors)]
    if not several:
        return _result([str(mpirun._find()), "-n", "2", *own], environ)
    with hosts(2) as made:
        for host in ("h1", "h2"):
            limit = f"tc qdisc replace dev e0 root tbf rate {RATE} burst 256kbit latency 50ms"
            subprocess.run(made.command(host, limit.split()), check=True)
        environ |= {**made.environment(), "PRTE_MCA_rmaps_default_mapping_policy": "slot"}
        carried = [
            o
            for name in (
                *mpirun._DEFAULTS,
                "PYTHONPATH",
                "OMPI_MCA_btl_tcp_if_include",
                "OMPI_MCA_mpi_yield_when_idle",
                "TMPDIR",
            )
            for o in ("-x", name)
        ]
        return _result(made.command("h1", [str(mpirun._find()), "-H", "h1:1,h2:1", "-n", "2", *carried, *own]), environ)


def _result(command: Sequence[str], environ: Mapping[str, str]) -> list:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=560)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def row(where: str, examples: int, layouts: Sequence[int], ends: Sequence[float], seen: Mapping[str, Any]) -> dict:
    whole, cut = (np.array(seen[name]) for name in ("whole", "in stages"))
    exchange = float(np.median(whole[:, 2]))
    hideable = min(ends[-1] - ends[0], exchange * sum(layouts[:-1]) / sum(layouts))
    saved = float(np.median(whole[:, 0]) - np.median(cut[:, 0]))
    spread: Callable[[np.ndarray], str] = lambda column: (  # noqa: E731
        f"{readable((s := Spread.of(column)).median)} ({readable(s.p10)} – {readable(s.p90)})"
    )
    return {
        "": where,
        "examples": examples,
        "stages": len(layouts),
        "computing": readable(float(np.median(whole[:, 1]))),
        "computing, in stages": readable(float(np.median(cut[:, 1]))),
        "exchanging": readable(exchange),
        "step, whole": spread(whole[:, 0]),
        "step, in stages": spread(cut[:, 0]),
        "saved": readable(saved),
        "can be hidden": readable(hideable),
        "hidden": f"{100 * saved / hideable:.0f} %",
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--stages", default="auto", help="on two hosts; on one it is 4")
    arguments.add_argument("--tensors", type=int, default=0, help="the last so many of the model's; 0: all")
    arguments.add_argument("--rank", action="store_true", help="what each rank is started with")
    given = arguments.parse_args()
    global _tensors
    _tensors = given.tensors
    if given.rank:
        on_rank(given.rounds, "auto" if given.stages == "auto" else int(given.stages))
        return
    rows, notes = [], []
    for where, several, stages in (("two hosts", True, given.stages), ("one host", False, "4")):
        examples, layouts, ends, seen, decided, apart = start(given.rounds, stages, several)
        rows.append(row(where, examples, layouts, ends, seen))
        megabytes = " + ".join(f"{n / 1e6:.1f}" for n in layouts)
        notes.append(
            f"{where.capitalize()}: messages of {megabytes} MB; stages end after "
            f"{', '.join(readable(end) for end in ends)} where nothing is sent; what `explain` says: {decided!r}; "
            f"states differ by {apart:.1g} at most."
        )
    hidden = rows[0]["hidden"]
    report(
        f"Over a link of 1 Gbit/s, {hidden} of what can be hidden of an exchange is hidden behind the backward pass",
        rows,
        RESULTS / "overlap_between_hosts.md",
        [f"{len(shapes())} tensors; {given.rounds} rounds; of each step the slower rank.", *notes, SHARED],
    )


if __name__ == "__main__":
    main()
