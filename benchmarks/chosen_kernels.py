"""After 200 steps a program runs the fastest split of its batch into microbatches, to within 3 % (aimed at).

    PJRT_NPROC=1 python benchmarks/chosen_kernels.py [--all] [--minutes 3] [--write]

Five models run on one core, each at one batch size (with `--all` at a small, a medium and a large one): alone, beside a
process that compiles XLA programs, and beside one that spins, both on the same core. The warm program takes 200 steps;
the split that it runs in most of the last 20 is its choice. Then, without a neighbor, one program alternates between
all plausible splits. Some of these rounds determine the best split, and the others compare it with each choice. Without
`--all` no case begins after `--minutes`; the result names the cases left out.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _loops import conv_net, large_matrices
from _measure import contention, pin, readable, report

import adaptive as ad
import collectives as comm
from adaptive.runtime.kernels.choice import Choice

STEPS, LAST = 200, 20
MOST_CALLS = 32  # of a plausible split
BAR = 1.03
EXAMPLES = 4096
OPTIMIZER = optax.adam(1e-3)


class Case(NamedTuple):
    """A model, its data and its batch sizes: the one that is always measured, and others."""

    name: str
    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    data: Any
    batches: tuple[int, ...]


def cases() -> list[Case]:
    """Return a perceptron, the two models of the other benchmarks, and two that no other script has."""
    conv, matrices = conv_net("conv net", 0), large_matrices("large matrices", 0)
    return [
        perceptron((256, 4, 1024)),
        attention((24, 2, 128)),
        Case(conv.name, conv.params, conv.loss_fn, conv.data, (48, 4, 512)),
        recurrent((1000, 8, 100)),
        Case(matrices.name, matrices.params, matrices.loss_fn, matrices.data, (4, 64, 512)),
    ]


def perceptron(batches: tuple[int, ...]) -> Case:
    """Return two hidden layers of 256: 134 thousand parameters."""
    rng, widths = np.random.default_rng(0), (256, 256, 256, 10)
    params = [
        {"w": jnp.asarray(rng.normal(size=(i, o)) / np.sqrt(i), jnp.float32), "b": jnp.zeros(o)}
        for i, o in itertools.pairwise(widths)
    ]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return Case("perceptron", params, loss_fn, _data(rng, (256,)), batches)


def attention(batches: tuple[int, ...]) -> Case:
    """Return an attention layer over 32 tokens of width 48, and two dense layers."""
    rng, width = np.random.default_rng(1), 48
    names = ("q", "k", "v", "out", "up", "down")
    params = {n: jnp.asarray(rng.normal(size=(width, width)) / np.sqrt(width), jnp.float32) for n in names}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        q, k, v = (x @ params[n] for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bid,bjd->bij", q, k) / np.sqrt(width))
        x = x + (weights @ v) @ params["out"]
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
        return optax.softmax_cross_entropy_with_integer_labels(x.mean(1)[:, :10], batch["y"]).mean()

    return Case("attention", params, loss_fn, _data(rng, (32, width)), batches)


def recurrent(batches: tuple[int, ...]) -> Case:
    """Return a gated recurrent layer of 40 units over 12 time steps."""
    rng, units = np.random.default_rng(2), 40
    params = {n: jnp.asarray(rng.normal(size=(2 * units, units)) / np.sqrt(units), jnp.float32) for n in ("z", "h")}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            both = jnp.concatenate([h, x], axis=1)
            gate = jax.nn.sigmoid(both @ params["z"])
            return gate * h + (1 - gate) * jnp.tanh(both @ params["h"]), None

        first = jnp.zeros((batch["x"].shape[0], units))
        h, _ = jax.lax.scan(cell, first, jnp.swapaxes(batch["x"], 0, 1))
        return optax.softmax_cross_entropy_with_integer_labels(h[:, :10], batch["y"]).mean()

    return Case("recurrent", params, loss_fn, _data(rng, (12, units)), batches)


def _data(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    x = rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 10, EXAMPLES).astype(np.int32)}


def program(case: Case, batch: int) -> ad.Program:
    """Return a warm program that trains a model."""

    def driver(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(case.loss_fn)(params, batch)
        updates, opt_state = OPTIMIZER.update(comm.all_reduce(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": comm.all_reduce(loss)}

    made = ad.Program(driver, (case.params, OPTIMIZER.init(case.params)), case.data, global_batch=batch)
    made.warm_up()
    return made


# --- what is chosen ---------------------------------------------------------------------------------------------------


def chosen(case: Case, batch: int, neighbor: Callable[[], AbstractContextManager[Any]]) -> tuple[int, ...]:
    """Return the microbatches of most of the last steps, beside a neighbor."""
    made = program(case, batch)
    try:
        with neighbor():
            calls = [made.step().microbatches[0] for _ in range(STEPS)]
    finally:
        made.close()
        gc.collect()
    return Counter(calls[-LAST:]).most_common(1)[0][0]


# --- what is best -----------------------------------------------------------------------------------------------------


def plausible(batch: int) -> list[tuple[int, ...]]:
    """Return the whole batch, and microbatches of each power of two unless there are too many of them."""
    found = {(batch,)}
    for size in (1 << i for i in range(batch.bit_length())):
        rest = batch % size
        powers = [1 << i for i in reversed(range(rest.bit_length())) if rest >> i & 1]
        if batch // size + len(powers) <= MOST_CALLS:
            found.add((*(size,) * (batch // size), *powers))
    return sorted(found, key=len)


def in_alternation(made: ad.Program, ways: Sequence[tuple[int, ...]], rounds: int) -> np.ndarray:
    """Return the processor seconds of a step with each split; shape=(rounds, splits)."""
    kernels, seconds = made._parts.engine.kernels, np.empty((rounds, len(ways)))
    kernels.require_microbatches([sorted(set(itertools.chain(*ways)))])
    for r in range(-3, rounds):
        for i in range(len(ways)):
            way = (r + i) % len(ways)
            kernels.choices[0] = Choice(made.global_batch, 1, ways[way], steps=1000)
            began = time.process_time()
            calls = made.step().microbatches[0]
            jax.block_until_ready(made.state)
            assert calls == ways[way], "the program takes the calls that it is given"
            if r >= 0:
                seconds[r, way] = time.process_time() - began
    return seconds


def faster_half(seconds: np.ndarray) -> np.ndarray:
    """Return the mean of the faster half of the rounds."""
    return np.sort(seconds, axis=0)[: max(1, len(seconds) // 2)].mean(axis=0)


# --- neighbors -------------------------------------------------------------------------------------------------------

_COMPILE = """
import os, sys
parent, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
import jax, jax.numpy as jnp
def work(x):
    for i in range(6):
        x = jnp.tanh(x @ x.T @ x) + i
    return x.sum()
size = 8
print("compiling", flush=True)
while os.getppid() == parent:  # an orphan stops by itself
    jax.jit(jax.grad(work)).lower(jax.ShapeDtypeStruct((size, size), jnp.float32)).compile()
    size += 1
"""


@contextmanager
def compiling(core: int) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Yield a context manager during whose blocks a process on this core compiles one program after another.

    Outside the blocks that process is stopped.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    command = [sys.executable, "-c", _COMPILE, str(os.getpid()), str(core)]
    # XLA says on stderr which compiles are slow.
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=quiet, text=True)

    @contextmanager
    def running() -> Iterator[None]:
        child.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            child.send_signal(signal.SIGSTOP)

    try:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        yield running
    finally:
        child.kill()
        child.communicate()


# --- all of it --------------------------------------------------------------------------------------------------------


def measure(case: Case, batch: int, neighbors: dict[str, Any], rounds: int) -> Iterator[dict[str, object]]:
    """Return a row for each neighbor."""
    reference = program(case, batch)  # as long as it is there, what it has compiled is not compiled again
    try:
        choices = {name: chosen(case, batch, neighbor) for name, neighbor in neighbors.items()}
        ways = plausible(batch)
        ways += [calls for calls in dict.fromkeys(choices.values()) if calls not in ways]
        first = faster_half(in_alternation(reference, ways, rounds))
        best = ways[int(np.argmin(first))]
        again = list(dict.fromkeys([best, *choices.values()]))
        second = faster_half(in_alternation(reference, again, 2 * rounds))
    finally:
        reference.close()
        gc.collect()
    for name, calls in choices.items():
        yield {
            "model": case.name,
            "batch": batch,
            "beside": name,
            "chosen": in_words(calls),
            "best of all": in_words(best),
            "best, processor time": readable(second[0]),
            "chosen / best": f"{second[again.index(calls)] / second[0]:.3f}",
        }


def in_words(calls: Sequence[int]) -> str:
    """Format a split as "4 x 256 + 32"."""
    counts = Counter(calls)
    return " + ".join(f"{counts[k]} x {k}" if counts[k] > 1 else f"{k}" for k in sorted(counts, reverse=True))


def main() -> None:
    """Measure and report."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--all", action="store_true", help="each model at three batches, however long it takes")
    arguments.add_argument("--minutes", type=float, default=3, help="when the last case may begin, without --all")
    arguments.add_argument("--write", action="store_true", help="write the result's file")
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--only", default="", help="models whose names hold this")
    options = arguments.parse_args()
    core = max(os.sched_getaffinity(0))
    pin(core)
    rows, left_out, began = list[dict[str, object]](), list[str](), time.monotonic()
    with compiling(core) as compiler:
        neighbors = {"nobody": nullcontext, "a compiler": compiler, "a busy process": lambda: contention(core)}
        todo = [
            (case, batch)
            for case in cases()
            if options.only in case.name
            for batch in case.batches[: None if options.all else 1]
        ]
        for case, batch in todo:
            if not options.all and time.monotonic() - began > 60 * options.minutes:
                left_out.append(f"{case.name} at {batch}")
                continue
            for row in measure(case, batch, neighbors, options.rounds):
                rows.append(row)
                print(f"{time.monotonic() - began:4.0f} s", row, flush=True)
    ratios = [float(str(row["chosen / best"])) for row in rows]
    kept = sum(ratio <= BAR for ratio in ratios)
    notes = [
        f"One core, one thread, a warm program, {STEPS} steps; chosen is what runs in most of the last {LAST}. Aimed "
        f"at: at most {BAR}. {kept} of {len(ratios)} rows keep that; the largest ratio is {max(ratios):.3f}.",
        f"Best: of all splits into at most {MOST_CALLS} calls of a power of two, and the batch as one, by the "
        f"processor time of whole steps, {options.rounds} rounds in alternation, faster half; chosen / best from twice "
        "as many other rounds. Both with nobody beside them.",
    ]
    if left_out:
        notes.append(f"Not measured, as the time was over: {', '.join(left_out)}.")
    title = "After 200 steps a batch runs as the microbatches that are the fastest"
    report(title, rows, "chosen_kernels.md" if options.write else None, notes)


if __name__ == "__main__":
    main()
