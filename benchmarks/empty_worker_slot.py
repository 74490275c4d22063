"""An empty worker slot costs the other workers at most 1 %, and nothing is compiled when workers leave and join.

    PJRT_NPROC=1 python benchmarks/empty_worker_slot.py

Two workers train a conv net on two devices of this process, with the noise scale and balancing, in three worlds: with
two worker slots; with three, of which one is empty; and with three, of which one worker has a share of 0 and only
updates its state. Blocks of steps alternate, and are compared round by round.

Then workers leave and join repeatedly. Compiles are counted, and the first step after each change is compared with the
other steps.

The device of an empty slot takes part in the exchange. A worker without examples computes its update, on machines of
its own in parallel with the others; here it shares their cores.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from _measure import RESULTS, alternate, readable, report, summary

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _models import ConvNet

jax.config.update("jax_num_cpu_devices", 3)
BLOCK, ROUNDS, CHANGES = 10, 40, 20
OPTIMIZER = optax.adam(1e-3)
RNG = np.random.default_rng(0)
NET = ConvNet(10)
DATA = {"image": RNG.random((4096, 8, 8, 1), np.float32), "label": RNG.integers(0, 10, 4096).astype(np.int32)}


def loss_fn(params, batch):
    logits = NET.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def driver(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    avg_grads = comm.all_reduce(grads)
    noise = mon.noise_scale(grads, avg_grads)
    ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
    updates, opt_state = OPTIMIZER.update(avg_grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": comm.all_reduce(loss), "noise": noise.scale}


def program_in(world: comm.DeviceWorld, local_batch: int, **options) -> ad.Program:
    """Return a program of two workers on `local_batch` examples each, which `balance` cannot change."""
    params = NET.init(jax.random.key(0), DATA["image"][:1])
    state = (params, OPTIMIZER.init(params))
    sizes = {"global_batch": 2 * local_batch, "max_local_batch": local_batch, "deterministic": True, **options}
    program = ad.Program(driver, state, DATA, world=world, **sizes)
    program.warm_up()
    return program


def steps(program: ad.Program):
    return lambda: list(program.run(steps=BLOCK))[-1].metrics["loss"]


def cost(local_batch: int) -> dict[str, np.ndarray]:
    """Return the seconds of blocks of steps in the three worlds."""
    worlds = {"no such worker slot": comm.DeviceWorld(jax.local_devices()[:2])}
    worlds |= {name: comm.DeviceWorld() for name in ("an empty worker slot", "a share of 0")}
    worlds["an empty worker slot"].leave(2)
    shares = {"a share of 0": {"shares": [1, 1, 0]}}
    programs = {name: program_in(world, local_batch, **shares.get(name, {})) for name, world in worlds.items()}
    samples = alternate({name: steps(program) for name, program in programs.items()}, ROUNDS)
    for program in programs.values():
        program.close()
    return {name: seconds / BLOCK for name, seconds in samples.items()}


def changes() -> dict[str, str]:
    """Have workers leave and join, and return the number of compiles and the seconds of the first step after each
    change.
    """
    world, compiled = comm.DeviceWorld(), []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    program = program_in(world, 96, max_local_batch=192)
    list(program.run(steps=BLOCK))
    kernels, first, others = program.step().kernels, [], []
    del compiled[:]
    for change in range(CHANGES):
        worker_slot = change // 2 % 3
        (world.join if change % 2 else world.leave)(worker_slot)
        for number in range(BLOCK):
            start = time.perf_counter()
            made = program.step().kernels - kernels
            (others if number else first).append(time.perf_counter() - start)
    program.close()
    return {
        "changes": str(CHANGES),
        "compiled": str(sum("compile" in name or "trace" in name for name in compiled) + made),
        "first step": readable(float(np.median(first))),
        "its worst": readable(max(first)),
        "other steps": readable(float(np.median(others))),
        "their worst": readable(max(others)),
    }


def main() -> None:
    rows = [
        {"": row.name, "local batch": local_batch, **row.cells()}
        for local_batch in (64, 256)
        for row in summary(cost(local_batch))
    ]
    rows_of_changes = changes()
    notes = [f"Workers that leave and join: {', '.join(f'{k} {v}' for k, v in rows_of_changes.items())}."]
    report("What an empty worker slot costs", rows, RESULTS / "empty_worker_slot.md", notes)


if __name__ == "__main__":
    main()
