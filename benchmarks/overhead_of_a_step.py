"""What a step costs over a hand-written loop's: in time, and in pages of memory that it has the system map again.

    MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_MMAP_THRESHOLD_=33554432 PJRT_NPROC=1 \\
        mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/overhead_of_a_step.py

By hand: a jitted gradient into one flat buffer, one Allreduce in place, a jitted update. Ours has on top of that the
noise scale, the balancing hook, weighting by examples, the non-finite check and the compared decisions. Both take
their batches from the same arrays by fancy indexing; blocks of steps are timed in turn.

The target is 3 % at steps of 5 and of 20 ms, and 0.2 ms where there is nothing to compute; the results say how far
off it is. XLA takes and gives back the memory of its temporaries in every call. Where the top of glibc's heap is free
behind a step, glibc may return it to the system and fault it in again, megabytes at a time: on either side, by the
luck of what lies there. The two thresholds keep that memory, for both. (Set both: one alone turns off the adjustment
of the other, and both sides fault in over a thousand pages a step.) Page faults are counted, so that it shows.
"""

import os
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import alternate, pin, report, summary
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _models import ConvNet

RANKS = MPI.COMM_WORLD
pin(sorted(os.sched_getaffinity(0))[RANKS.rank % os.cpu_count()])
BLOCK, ROUNDS = 20, 25
OPTIMIZER = optax.adam(1e-3)
RNG = np.random.default_rng(0)


def conv_net():
    """Parameters, loss and data of a small conv net."""
    net = ConvNet(10)
    data = {
        "image": RNG.random((4096, 8, 8, 1), np.float32),
        "label": RNG.integers(0, 10, 4096).astype(np.int32),
    }

    def loss_fn(params, batch):
        logits = net.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return net.init(jax.random.key(0), data["image"][:1]), loss_fn, data


def empty():
    """One parameter, one number per example."""
    return (
        {"w": jnp.zeros(())},
        lambda params, batch: ((params["w"] - batch["x"]) ** 2).mean(),
        {"x": np.zeros(4096, np.float32)},
    )


def by_hand(params, loss_fn, data, local_batch):
    """What a careful user of JAX and mpi4py writes."""
    flat, unravel = ravel_pytree(params)
    n, rank, size = len(jax.tree.leaves(data)[0]), RANKS.rank, RANKS.size

    @jax.jit
    def gradient(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jnp.concatenate([ravel_pytree(grads)[0], loss[None]])

    @jax.jit
    def update(params, opt_state, total):
        updates, opt_state = OPTIMIZER.update(unravel(total[:-1] / size), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total[-1] / size

    kept = {"params": params, "opt": OPTIMIZER.init(params), "at": 0, "order": RNG.permutation(n)}
    buffer = np.empty(flat.size + 1, np.float32)

    def steps():
        for _ in range(BLOCK):
            start = (kept["at"] + rank * local_batch) % (n - local_batch)
            batch = jax.tree.map(lambda a, s=start: a[kept["order"][s : s + local_batch]], data)
            kept["at"] += size * local_batch
            np.copyto(buffer, gradient(kept["params"], batch))
            RANKS.Allreduce(MPI.IN_PLACE, buffer)
            kept["params"], kept["opt"], loss = update(kept["params"], kept["opt"], buffer)
        return loss

    return steps


def ours(params, loss_fn, data, local_batch, world):
    """The same training step as a driver, with the noise scale and balancing."""

    def driver(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, avg_grads)
        ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
        updates, opt_state = OPTIMIZER.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": comm.all_reduce(loss), "noise": noise.scale}

    state = (params, OPTIMIZER.init(params))
    # The same kernel calls as by hand: one per batch, and of that size. Balancing works, but has no room to move, since
    # what is to be seen is what its work costs, and not what other sizes do.
    sizes = {"global_batch": local_batch * world.size, "max_local_batch": local_batch, "deterministic": True}
    program = ad.Program(driver, state, data, world=world, **sizes)
    program.warm_up()
    return lambda: list(program.run(steps=BLOCK))[-1].metrics["loss"]


def counted(call, faults):
    """The call, noting how many page faults a step of it took."""

    def counting():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        result = jax.block_until_ready(call())
        faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / BLOCK)
        return result

    return counting


with comm.world() as world:
    rows, notes = [], []
    for name, model, local_batch in (("empty", empty, 8), ("about 5 ms", conv_net, 64), ("about 20 ms", conv_net, 256)):
        params, loss_fn, data = model()
        calls = {
            "by hand": by_hand(params, loss_fn, data, local_batch),
            "ours": ours(params, loss_fn, data, local_batch, world),
        }
        faults = {side: [] for side in calls}
        calls = {side: counted(call, faults[side]) for side, call in calls.items()}
        seconds = alternate(calls, ROUNDS, warmup=3)
        hand, mine = summary({k: v / BLOCK for k, v in seconds.items()})
        difference = np.median(seconds["ours"] - seconds["by hand"]) / BLOCK * 1e3
        rows += [
            {
                "step": name,
                "local batch": local_batch,
                **side.cells(),
                "page faults a step, rank 0": f"{np.mean(faults[side.name][-ROUNDS:]):.1f}",
            }
            for side in (hand, mine)
        ]
        notes.append(f"{name}: ours is {difference:+.3f} ms a step (median of paired differences).")
    if world.rank == 0:
        notes.append(
            f"{RANKS.size} ranks, one core and one thread each; {ROUNDS} rounds of {BLOCK} steps. Balancing is "
            "computed, but workers may take no more than they have, so that both sides run the same kernels on the "
            "same sizes."
        )
        kept = os.environ.keys() >= {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
        notes.append(
            f"Freed memory is {'kept' if kept else 'returned to the system as glibc sees fit'}, on both sides."
        )
        report("What a step costs over a hand-written loop's", rows, "overhead_of_a_step.md", notes)
