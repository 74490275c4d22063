"""Between hosts, stages of the backward pass hide 70 % of the part of an exchange that can be hidden.

    python benchmarks/overlap_between_hosts.py

Two hosts are network namespaces joined by a link of 1 Gbit/s (Linux and root). Each rank has one core, for XLA's only
thread and for sending. A chain of layers has parameters of ResNet-50's shapes, so that 97.6 MiB of gradients are sent.
The batch is fitted so that the backward pass takes about as long as the exchange; both are measured. Two programs of
that driver, one whole and one in stages, take steps in alternation. The second also runs without knowing the
computation that is beside a message: it then waits in MPI.

What can be hidden is the lesser of what is computed after the first stage and what is exchanged before the last
message. The first is measured in the same rounds on stages that send nothing, in a world of one worker. The second is
the exchange of the whole program times the share of bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from _hosts import job, joined, tell
from _measure import RESULTS, Spread, pin, readable, report

import adaptive as ad
import collectives as comm
from adaptive.base.timeline import Timeline
from adaptive.runtime.general_step import GeneralStep

Params = list[jax.Array]
RATE = "1gbit"
FITS, CLOSE, LARGEST = 5, 0.1, 4096  # of the batch
WHOLE, STAGES, SPINNING = "whole", "in stages", "in stages, waiting in MPI"
SHARED = (
    "Each rank has one core. A thread that waits in MPI spins beside XLA's thread. In stages, the training thread "
    "checks unfinished pieces and sleeps while a later stage is computed; *waiting in MPI* is the same program "
    "without that. *Processor* is the processor time of a rank's threads in a step. The hidden share is that of "
    "medians; brackets have the shares for the 10th and the 90th percentile of the seconds saved per round. On one "
    "host an exchange is a copy by the same cores, and stages always wait in MPI."
)
YIELDS = "OMPI_MCA_mpi_yield_when_idle"  # the default of Open MPI, unless it is set for this script
_tensors = 0  # the last so many; 0 for all


def shapes() -> list[tuple[int, ...]]:
    from exchange_resnet50 import resnet50  # imports MPI

    return resnet50()[-_tensors:]


def loss(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the loss of a chain of products with all kernels, each followed by its scale and offset. Widths are
    fitted.
    """
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


def seconds_forward(examples: int) -> float:
    """Return the seconds of the loss alone."""
    rng = np.random.default_rng(0)
    params = [jnp.zeros(s) for s in shapes()]
    batch = {"x": jnp.asarray(rng.normal(size=(examples, 64)), jnp.float32)}
    compiled = jax.jit(loss).lower(params, batch).compile()
    return float(np.median([_seconds(lambda: jax.block_until_ready(compiled(params, batch))) for _ in range(5)][1:]))


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def fitted(world: Any, examples: int) -> tuple[int, float]:
    """Return a batch for which the backward pass takes as long as the exchange, and the backward pass's share of
    computing.

    Replicated on both ranks.

    Args:
      examples: the first batch to try.
    """
    for _ in range(FITS):
        with built(world, examples, False) as program:
            seen = [program.step() for _ in range(8)][1:]
        computing = float(np.median([max(r.compute_seconds) for r in seen]))
        exchanging = float(np.median([r.breakdown.exchanging for r in seen]))
        share = 1 - min(0.6, seconds_forward(examples) / computing)
        share, wanted = _of_first(world, [share, examples * exchanging / (share * computing)])
        if abs(wanted / examples - 1) < CLOSE:
            break
        examples = round(min(LARGEST, max(8, wanted)))
    return examples, share


def _of_first(world: Any, value: Any) -> Any:
    return json.loads(world.all_gather_bytes(json.dumps(value).encode())[0])


@contextmanager
def waiting_in_mpi() -> Iterator[None]:
    """Have the program wait in MPI, as if nothing were computed beside a message."""
    usual, GeneralStep.still_computes = GeneralStep.still_computes, lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        GeneralStep.still_computes = usual  # type: ignore[method-assign]


def on_rank(rounds: int, stages: int | Literal["auto"], first: int) -> None:
    with comm.MPIWorld() as world, comm.SoloWorld() as nobody:
        pin(sorted(os.sched_getaffinity(0))[world.rank % 2])
        examples, share = fitted(world, first)
        whole, cut = built(world, examples, False), built(world, examples, stages)
        layouts = [layout.nbytes for layout in cut._parts.engine.layouts]
        alone = built(nobody, examples, len(layouts))
        decided = next(line for line in cut.explain().splitlines() if line.startswith("overlap"))
        for program in (whole, cut, alone):
            program.step()
        apart = max(float(jnp.abs(a - b).max()) for a, b in zip(whole.state, cut.state, strict=True))
        kinds: dict[str, tuple[ad.Program, Callable[[], AbstractContextManager[None]]]] = {
            WHOLE: (whole, nullcontext),
            STAGES: (cut, nullcontext),
            SPINNING: (cut, waiting_in_mpi),
        }
        seen: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in kinds}
        ends: list[list[float]] = []
        for n in range(-1, rounds):
            for i in range(len(kinds)):
                name = list(kinds)[(n + i) % len(kinds)]
                program, manner = kinds[name]
                world.barrier()
                began, used = time.perf_counter(), time.process_time()
                with manner():
                    told = program.step()
                jax.block_until_ready(program._parts.engine.states[0])
                seconds, used = time.perf_counter() - began, time.process_time() - used
                if n >= 0:
                    seen[name].append((seconds, max(told.compute_seconds), told.breakdown.exchanging, used))
            world.barrier()
            ends.append([end for what, (_, end) in course(alone, 1).items() if what.startswith("stage")])
        times = [f"{what} {1e3 * b:.0f} – {1e3 * e:.0f}" for what, (b, e) in course(cut, 5).items()]
        for program in (whole, cut, alone):
            program.close()
        everyone = [json.loads(row) for row in world.all_gather_bytes(json.dumps([seen, ends[1:]]).encode())]
        slowest = {name: np.max([own[name] for own, _ in everyone], axis=0).tolist() for name in kinds}
        ends_of_slower = np.median(np.max([own for _, own in everyone], axis=0), axis=0).tolist()
        if world.rank == 0:
            result = [examples, share, layouts, ends_of_slower, slowest, decided, apart, times]
            tell(result)


def course(program: ad.Program, steps: int) -> dict[str, tuple[float, float]]:
    """Return when each part of a step of this rank began and ended, in seconds, ordered by the ends: medians of some
    steps.
    """
    engine, seen = program._parts.engine, Timeline()
    engine.context.timeline, engine.context.activity.turned = seen, seen.turned
    for _ in range(steps):
        program.step()
    engine.context.timeline = engine.context.activity.turned = None
    spans: dict[str, list[tuple[float, float]]] = {}
    began = 0.0
    for span in sorted(seen.spans, key=lambda span: (span.began, span.ended)):
        stage = re.search(r"stage (\d+) of", span.name)
        message = re.search(r"message (\d+)", span.details.get("message", ""))
        if stage and stage[1] == "1":
            began = span.began
        if stage or (message and span.name in ("exchanging", "waiting")):
            what = f"stage {stage[1]}" if stage else f"{span.name} {message[1]}"  # type: ignore[index]
            spans.setdefault(what, []).append((span.began - began, span.ended - began))
    middle = {what: tuple(np.median(times, axis=0).tolist()) for what, times in spans.items()}
    return dict(sorted(middle.items(), key=lambda item: item[1][1]))


def start(rounds: int, stages: str, several: bool) -> list:
    """Return the result of two ranks, on two hosts or on one."""
    ranks = [__file__, "--rank", "--rounds", str(rounds), "--stages", stages]
    ranks += ["--tensors", str(_tensors), "--first", "1024" if several else "64"]
    environ = {YIELDS: os.environ.get(YIELDS, "0")}
    if not several:
        return job(ranks, 2, environ=environ)
    with joined(2, RATE) as made:
        return job(ranks, 2, made, environ=environ)


def rows_of(where: str, share: float, layouts: Sequence[int], ends: Sequence[float], seen: Mapping[str, Any]) -> list:
    """Return a row of medians for each way to take a step."""
    columns = {name: np.array(times) for name, times in seen.items()}
    whole = columns[WHOLE]
    exchange = float(np.median(whole[:, 2]))
    hideable = min(ends[-1] - ends[0], exchange * sum(layouts[:-1]) / sum(layouts))
    found = []
    for name, column in columns.items():
        _, computing, exchanging, used = np.median(column, axis=0)
        spread, saved = Spread.of(column[:, 0]), Spread.of(whole[:, 0] - column[:, 0])
        cells = {
            "": f"{where}, {name}",
            "computing": readable(computing),
            "exchanging": readable(exchanging),
            "processor": readable(used),
            "step": f"{readable(spread.median)} ({readable(spread.p10)} – {readable(spread.p90)})",
        }
        if name == WHOLE:
            found.append({**cells, "backward / exchange": f"{share * computing / exchanging:.2f}"})
            continue
        shares = " – ".join(f"{100 * s / hideable:.0f}" for s in (saved.p10, saved.p90))
        saved_in_all = float(np.median(whole[:, 0])) - spread.median
        hidden = f"{100 * saved_in_all / hideable:.0f} % ({shares})"
        found.append({**cells, "saved": readable(saved_in_all), "can be hidden": readable(hideable), "hidden": hidden})
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--stages", default="auto", help="on two hosts; on one it is 4")
    arguments.add_argument("--tensors", type=int, default=0, help="the last so many of the model's; 0: all")
    arguments.add_argument("--first", type=int, default=0, help="what each rank is started with: examples")
    arguments.add_argument("--rank", action="store_true", help="what each rank is started with")
    given = arguments.parse_args()
    global _tensors
    _tensors = given.tensors
    if given.rank:
        on_rank(given.rounds, "auto" if given.stages == "auto" else int(given.stages), given.first)
        return
    rows, notes = [], []
    for where, several, stages in (("two hosts", True, given.stages), ("one host", False, "4")):
        examples, share, layouts, ends, seen, decided, apart, course = start(given.rounds, stages, several)
        rows += rows_of(where, share, layouts, ends, seen)
        megabytes = " + ".join(f"{n / 1e6:.1f}" for n in layouts)
        notes.append(
            f"{where.capitalize()}: {examples} examples per rank; messages of {megabytes} MB; stages end after "
            f"{', '.join(readable(end) for end in ends)} where nothing is sent; a step in stages, in ms: "
            f"{', '.join(course)}; what `explain` says: {decided!r}; states differ by {apart:.1g} at most."
        )
    hidden = rows[1]["hidden"]
    report(
        f"Over a link of 1 Gbit/s, {hidden} of what can be hidden of an exchange is hidden behind the backward pass",
        rows,
        RESULTS / "overlap_between_hosts.md",
        [f"{len(shapes())} tensors; {given.rounds} rounds; of each step the slower rank.", *notes, SHARED],
    )


if __name__ == "__main__":
    main()
