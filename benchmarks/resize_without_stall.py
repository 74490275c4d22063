"""A batch takes on a new size, and no step waits for a compiler.

    python benchmarks/resize_without_stall.py

Twenty changes to new sizes with compiled buckets, against compiling on demand (`jax.jit`). Also reported: how long the
background compiler takes for all buckets, and how much it slows down the steps meanwhile. On a GPU the result goes to a
file of its own.
"""

import os
import time

import jax
import numpy as np
import optax
from _examples import ConvNet
from _measure import Spread, command_line, pin, readable, report
from _timed_models import cross_entropy
from _training import driver_of

import adaptive as ad

STEPS, FIRST = 12, 128
NET = ConvNet(10)
OPTIMIZER = optax.adam(1e-3)
LOSS = cross_entropy(NET.apply)
RNG = np.random.default_rng(0)
DATA = {"image": RNG.random((8192, 8, 8, 1), np.float32), "label": RNG.integers(0, 10, 8192).astype(np.int32)}
ODD_SIZES = RNG.permutation(np.setdiff1d(np.arange(33, 250), 2 ** np.arange(9))).tolist()


@jax.jit
def on_demand(params, opt_state, batch):
    """Take the same step, compiled when its batch has a new shape."""
    updates, opt_state = OPTIMIZER.update(jax.grad(LOSS)(params, batch), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def warming(program):
    """Time steps while buckets are compiled, and steps after that."""
    behind, start = [], time.perf_counter()
    program.step()
    while not program._parts.engine.kernels.warm:
        behind.append(timed(program.step))
    until_warm = time.perf_counter() - start
    return until_warm, behind, [timed(program.step) for _ in range(50)]


def timed(call, *args):
    """Return the seconds of one call, until its result is ready."""
    start = time.perf_counter()
    out = call(*args)
    jax.block_until_ready(out if not isinstance(out, ad.Report) else out.metrics)
    return time.perf_counter() - start


def steps_on_demand(state, size):
    """Time steps of the plain loop at one size; the first of them compiles."""
    seconds, params, opt_state = [], *state
    for step in range(STEPS):
        rows = np.arange(step * size, (step + 1) * size) % 8192
        batch = jax.tree.map(lambda a, r=rows: a[r], DATA)
        start = time.perf_counter()
        params, opt_state = jax.block_until_ready(on_demand(params, opt_state, batch))
        seconds.append(time.perf_counter() - start)
    return (params, opt_state), seconds


def worst_to_median(blocks):
    """Return for each size its slowest step over the median of its steps."""
    return Spread.of([max(b) / np.median(b) for b in blocks]), max(max(b) / np.median(b) for b in blocks)


def main():
    """Measure and report."""
    args = command_line(__doc__, changes=20).parse_args()
    changes = args.changes
    sizes, device = ODD_SIZES[:changes], jax.devices()[0]
    on_gpu = device.platform != "cpu"
    if not on_gpu:
        pin(*sorted(os.sched_getaffinity(0))[:2])
    params = NET.init(jax.random.key(0), DATA["image"][:1])
    state = (params, OPTIMIZER.init(params))
    program = ad.Program(driver_of(LOSS, OPTIMIZER), state, DATA, global_batch=FIRST)
    until_warm, behind, after = warming(program)
    program.rescale(global_batch=256)  # buckets are compiled up to the largest size
    program.step()
    program.warm_up()
    list(program.run(steps=80))
    kernels, waited = program.step().kernels, program.step().waited_seconds
    ours, plain = [], []
    for part in (sizes[: changes // 2], sizes[changes // 2 :]):
        list(program.run(steps=20))  # what ran last is this program, and not the other's compiler
        for size in part:
            program.rescale(global_batch=size)
            ours.append([])
            for _ in range(STEPS):
                start = time.perf_counter()
                last = program.step()
                jax.block_until_ready(last.metrics)
                ours[-1].append(time.perf_counter() - start)
            assert last.global_batch == size
        for size in part:
            state, seconds = steps_on_demand(state, size)
            plain.append(seconds)
    rows = []
    for name, blocks in (("ours, all buckets", ours), ("jax.jit, on demand", plain)):
        spread, worst = worst_to_median(blocks)
        rows.append(
            {
                "": name,
                "median step": readable(float(np.median(np.concatenate(blocks)))),
                "first step at a new size": readable(float(np.median([b[0] for b in blocks]))),
                "worst step / median of its size: median": f"{spread.median:.2f}",
                "p90": f"{spread.p90:.2f}",
                "worst": f"{worst:.2f}",
            }
        )
    notes = [
        f"{changes} sizes from 33 to 249 that are not powers of two, {STEPS} steps each; half the sizes of ours, "
        f"of the plain loop, and again. Kernels compiled during the changes: {last.kernels - kernels}; seconds that "
        f"steps waited for a compiler: {last.waited_seconds - waited:.3f}.",
        f"From the first step until all buckets are compiled: {until_warm:.1f} s. Steps meanwhile took "
        f"{readable(float(np.median(behind)))} in the median (worst {readable(max(behind))}), and "
        f"{readable(float(np.median(after)))} after it (worst {readable(max(after))}).",
        f"One worker on {device.device_kind}."
        if on_gpu
        else "One process on two cores, so the compiler runs on the core beside the steps.",
    ]
    path = f"resize_without_stall{'_on_a_gpu' * on_gpu}.md" if args.write else None
    report("A new batch size costs no compile and no stall", rows, path, notes)


if __name__ == "__main__":
    main()
