"""On a CPU a large batch runs as microbatches that fit the cache: the rule against each fixed size, in alternation.

    PJRT_NPROC=1 python benchmarks/microbatches_against_one_kernel.py

The digits' conv net with a local batch of 1024 on one core: with the microbatches of the rule, with one kernel of 1024,
and with each fixed microbatch size.
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from _measure import alternate, pin, report, summary

import adaptive as ad
import collectives as comm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _models import ConvNet

BATCH, ROUNDS = 1024, 15
NET = ConvNet(10)
OPTIMIZER = optax.sgd(1e-2)
RNG = np.random.default_rng(0)


def driver(state, batch):
    """Take one training step."""
    params, opt_state = state

    def loss_fn(params):
        logits = NET.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    grads = comm.all_reduce(jax.grad(loss_fn)(params))
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {}


def measure(side):
    """Time steps of one batch in the chosen microbatches and in each fixed size."""
    data = {"image": RNG.random((4096, side, side, 1), np.float32), "label": RNG.integers(0, 10, 4096).astype(np.int32)}
    params = NET.init(jax.random.key(0), data["image"][:1])
    state = (params, OPTIMIZER.init(params))
    chosen = ad.Program(driver, state, data, global_batch=BATCH)
    chosen.warm_up()
    fixed = {
        f"{BATCH // microbatch} x {microbatch}": ad.Program(
            driver, state, data, global_batch=BATCH, microbatch=microbatch, deterministic=True
        )
        for microbatch in (1024, 512, 256, 128, 64)
    }
    calls = {"chosen": lambda: step(chosen)} | {name: (lambda p=p: step(p)) for name, p in fixed.items()}
    seconds = alternate(calls, ROUNDS, warmup=3)
    best = min(fixed, key=lambda name: np.median(seconds[name]))
    rows = [{"images": f"{side}x{side}", **row.cells()} for row in summary(seconds, baseline="1 x 1024")]
    ratio = float(np.median(seconds["chosen"] / seconds[best]))
    calls_made = chosen.step().microbatches[0]
    made_of = " + ".join(f"{calls_made.count(size)} x {size}" for size in sorted(set(calls_made), reverse=True))
    note = (
        f"{side}x{side}: the program chose {made_of}; the best fixed way is {best}, and chosen / best is {ratio:.3f} "
        "(median of paired ratios)."
    )
    return rows, note


def step(program):
    """Take one step, and wait for it."""
    program.step()
    return program.state


if __name__ == "__main__":
    pin(min(os.sched_getaffinity(0)))
    rows, notes = [], []
    for side in (8,):
        more, note = measure(side)
        rows += more
        notes.append(note)
    notes.append(f"A local batch of {BATCH} on one core and one thread; ratios are to one kernel of {BATCH}.")
    report(
        "A large batch runs as the microbatches that measure fastest", rows, "microbatches_against_one_kernel.md", notes
    )
