"""With a busy neighbour on one of two cores, balancing brings the step near the ideal one. (Aimed at: within 8 %.)

    PJRT_NPROC=1 mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/balance_under_contention.py

Two ranks pinned to two cores, a busy process on the second. Four ways to train one conv net take turns: balanced;
equal batches; the split by the speeds that were measured with equal batches, fixed; and a BSP loop as PyTorch's DDP
runs it (equal batches, mean of means), written by hand. The ideal is computed from measured speeds: with equal batches,
how long each rank computes gives its seconds per example, and the ideal split lets both finish together. A neighbour's
time slices are noise, and a step waits for whoever is late: no split is as good as the ideal, also not the fixed one.
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Spread, contention, pin, readable, report
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _models import ConvNet

RANKS = MPI.COMM_WORLD
CORE = sorted(os.sched_getaffinity(0))[RANKS.rank % os.cpu_count()]
pin(CORE)
BATCH, BLOCK, ROUNDS = 1024, 10, 24
FIXED = "fixed, by measured speeds"
NET, OPTIMIZER, RNG = ConvNet(10), optax.adam(1e-3), np.random.default_rng(0)
DATA = {"image": RNG.random((8192, 8, 8, 1), np.float32), "label": RNG.integers(0, 10, 8192).astype(np.int32)}
PARAMS = NET.init(jax.random.key(0), DATA["image"][:1])


def loss_fn(params, batch):
    """Mean cross entropy."""
    logits = NET.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def equal(state, batch):
    """One step of training; measures, and changes nothing."""
    params, opt_state = state
    grads = comm.all_reduce(jax.grad(loss_fn)(params, batch))
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    seconds = comm.all_gather(mon.compute_seconds())
    return (optax.apply_updates(params, updates), opt_state), {"seconds": seconds}


def balanced(state, batch):
    """The same, balanced."""
    state, metrics = equal(state, batch)
    ctrl.hook(ctrl.balance(), metrics["seconds"], every=BLOCK)
    return state, metrics


def ddp_style():
    """By hand: equal batches, mean of means."""
    _, unravel = ravel_pytree(PARAMS)
    gradient = jax.jit(lambda params, batch: ravel_pytree(jax.grad(loss_fn)(params, batch))[0])

    @jax.jit
    def update(params, opt_state, total):
        updates, opt_state = OPTIMIZER.update(unravel(total / RANKS.size), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    kept = {"state": (PARAMS, OPTIMIZER.init(PARAMS)), "step": 0}
    local = BATCH // RANKS.size

    def step():
        rows = (kept["step"] * BATCH + RANKS.rank * local + np.arange(local)) % 8192
        kept["step"] += 1
        flat = np.array(gradient(kept["state"][0], jax.tree.map(lambda a: a[rows], DATA)))
        RANKS.Allreduce(MPI.IN_PLACE, flat)
        kept["state"] = jax.block_until_ready(update(*kept["state"], jnp.asarray(flat)))

    return step


def measure(world):
    """Seconds per step of each way by block, all sizes, and the compute seconds seen with equal batches."""
    programs = {
        name: ad.Program(d, (PARAMS, OPTIMIZER.init(PARAMS)), DATA, global_batch=BATCH, world=world)
        for name, d in (("balanced", balanced), ("equal", equal), (FIXED, equal))
    }
    by_hand = ddp_style()
    for program in programs.values():
        program.warm_up()
        list(program.run(steps=40))
    for _ in range(5):
        by_hand()
    neighbour = contention(CORE) if world.rank == world.processes - 1 else None
    world.barrier()
    if neighbour is not None:
        neighbour.__enter__()
    world.barrier()
    seconds: dict[str, list[float]] = {"balanced": [], "equal": [], FIXED: [], "by hand, as DDP": []}
    sizes, computed = [programs["balanced"].batch_sizes], []
    for turn in range(ROUNDS):
        if turn == ROUNDS // 4:
            programs[FIXED].rescale(shares=1 / np.mean(computed, axis=0))
            list(programs[FIXED].run(steps=BLOCK))
        for name, program in programs.items():
            blocks = list(program.run(steps=BLOCK))
            seconds[name].append(sum(r.seconds for r in blocks) / BLOCK)
            if name == "equal":
                computed += [np.asarray(r.metrics["seconds"]) for r in blocks[1:]]
            elif name == "balanced":
                for report_of_step in blocks:
                    if report_of_step.batch_sizes != sizes[-1]:
                        sizes.append(report_of_step.batch_sizes)
        start = MPI.Wtime()
        for _ in range(BLOCK):
            by_hand()
        seconds["by hand, as DDP"].append((MPI.Wtime() - start) / BLOCK)
    if neighbour is not None:
        neighbour.__exit__(None, None, None)
    return seconds, sizes, programs[FIXED].batch_sizes, np.array(computed)


def main():
    """Measure and report."""
    with comm.world() as world:
        seconds, sizes, fixed, computed = measure(world)
        if world.rank:
            return
        per_example = computed.mean(0) / (BATCH / world.size)
        compute_ideal = BATCH / (1 / per_example).sum()
        rest = float(np.mean(seconds["equal"]) - computed.mean(0).max())  # exchange, update, hooks, whatever the split
        ideal = compute_ideal + max(rest, 0.0)
        settled = {name: np.array(s[ROUNDS // 4 :]) for name, s in seconds.items()}
        rows = []
        for name, sample in settled.items():
            ratio = Spread.of(sample / settled["balanced"])
            rows.append(
                {
                    "": name,
                    "mean step": readable(float(sample.mean())),
                    "p10 – p90 of blocks": f"{readable(Spread.of(sample).p10)} – {readable(Spread.of(sample).p90)}",
                    "mean / ideal": f"{sample.mean() / ideal:.3f}",
                    "balanced is faster by": f"{sample.mean() / settled['balanced'].mean():.2f} x",
                    "paired, p10 – p90": f"{ratio.p10:.2f} – {ratio.p90:.2f}",
                }
            )
        shown = " → ".join("+".join(map(str, s)) for s in sizes)
        over = [max(per_example * np.array(s)) / compute_ideal for s in sizes]
        notes = [
            f"Ideal step from measured speeds: {readable(ideal)} ({readable(compute_ideal)} of computing: the ranks "
            f"take {per_example[0] * 1e6:.1f} and {per_example[1] * 1e6:.1f} µs an example).",
            f"Batch sizes of the balanced program: {shown}. Adjustments: {len(sizes) - 1} in {ROUNDS * BLOCK} steps. "
            f"Those of the fixed one: {'+'.join(map(str, fixed))}.",
            f"Computing, by the measured speeds, over the ideal split's: {over[0]:.2f} at first, "
            f"{over[min(2, len(over) - 1)]:.2f} after two adjustments, {max(over[2:], default=over[-1]):.2f} at most "
            f"from then on.",
            f"Means, because a neighbour's time slices make a step either fast or slow; the last three quarters of "
            f"{ROUNDS} blocks of {BLOCK} steps, the four ways in turn.",
        ]
        report("Balancing against a busy neighbour", rows, "balance_under_contention.md", notes)


if __name__ == "__main__":
    main()
