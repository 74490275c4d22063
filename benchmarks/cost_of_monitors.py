"""The cost of each monitor of gradient noise in a training step, side by side in one run.

    MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_MMAP_THRESHOLD_=33554432 PJRT_NPROC=1 \
        python benchmarks/cost_of_monitors.py --write

One driver with Adam per monitor and model runs on one worker with two microbatches, which serve as groups for the
monitors that need groups. Blocks of steps alternate, and are compared round by round with the driver without monitors.
All compute the same updates. Measured is the processor time of a process with one thread, so that other load matters
little; the 4 to 12 bytes that a monitor adds to a message are not included. On a GPU it is the time by the clock, of
other models, and the result goes to a file of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from _measure import alternate, command_line, pin, report, rows_beside, table
from _timed_models import OPTIMIZER, Model, attention, perceptron, transformer

import adaptive as ad
import collectives as comm
import monitors as mon

NOTHING = "no monitor"
ON_GPU = jax.devices()[0].platform != "cpu"


def layer(path: tuple[str, ...]) -> str:
    """Return the name of a leaf's layer: its path without the last part."""
    return "/".join(path[:-1])


# Each monitor, as a function of the gradients, their mean, the norms of examples and the optimizer's state.
MONITORS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    NOTHING: lambda grads, avg, norms, state: (),
    "noise_scale, per worker": lambda grads, avg, norms, state: mon.noise_scale(grads, avg),
    "the same, by layer": lambda grads, avg, norms, state: mon.noise_scale(grads, avg, by=layer),
    "the same, divide_by=adam_scale": lambda grads, avg, norms, state: mon.noise_scale(
        grads, avg, divide_by=mon.adam_scale(state)
    ),
    "noise_scale, per example": lambda grads, avg, norms, state: mon.noise_scale(grads, avg, per_example=norms),
    "per example, by layer": lambda grads, avg, norms, state: mon.noise_scale(grads, avg, per_example=norms, by=layer),
    "per example, sample=2": lambda grads, avg, norms, state: mon.noise_scale(grads, avg, per_example=norms),
}


def monitors_of(parts: str) -> list[str]:
    """Return the monitors to time: those whose names contain one of the comma-separated parts, and none."""
    return [name for name in MONITORS if name == NOTHING or any(part in name for part in parts.split(","))]


def program(model: Model, name: str) -> ad.Program:
    """Return a warm program that trains a model with the monitor of this name; its noise scales are metrics."""
    monitor, options = MONITORS[name], {"sample": 2} if "sample" in name else {}

    def driver(state: tuple, batch: Any) -> tuple:
        params, opt_state = state
        if "per example" in name:
            loss, grads, norms = mon.example_norms(model.loss_fn, **options)(params, batch)
        else:
            (loss, grads), norms = jax.value_and_grad(model.loss_fn)(params, batch), None
        avg_grads = comm.all_reduce(grads)
        metrics = {"loss": comm.all_reduce(loss), "noise": monitor(grads, avg_grads, norms, opt_state)}
        updates, opt_state = OPTIMIZER.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    batch = model.local_batch
    state = (model.params, OPTIMIZER.init(model.params))
    sizes = {"global_batch": batch, "microbatch": batch // 2, "resizable": False}
    made = ad.Program(driver, state, model.data, **sizes, deterministic=True)
    made.warm_up()
    return made


def measured(model: Model, rounds: int, block: int, parts: str) -> list[dict[str, object]]:
    """Return a row for each monitor: the seconds of a step, and their ratio to those without a monitor."""
    programs = {name: program(model, name) for name in monitors_of(parts)}
    calls = {name: lambda p=p: list(p.run(steps=block))[-1].metrics["loss"] for name, p in programs.items()}
    clock = time.perf_counter if ON_GPU else time.process_time
    seconds = {name: s / block for name, s in alternate(calls, rounds, clock=clock).items()}
    for p in programs.values():
        p.close()
    return rows_beside(seconds, NOTHING, "more", step=model.name, batch=model.local_batch)


def models() -> list[Model]:
    """Return the timed models: a layer per example, and layers that are applied to each token."""
    if ON_GPU:
        return [attention("attention", 512), transformer("transformer", 16)]
    return [perceptron("perceptron", 256), attention("attention", 32)]


def main() -> None:
    """Measure and report."""
    args = command_line(
        __doc__,
        rounds=21,
        block=(10, "steps that are timed together"),
        only=("", "models whose names contain this"),
        monitors=("", "monitors whose names contain one of these, separated by commas"),
    ).parse_args()
    if not ON_GPU:
        pin(max(os.sched_getaffinity(0)))
    rows = []
    for model in models():
        if args.only in model.name:
            rows += measured(model, args.rounds, args.block, args.monitors)
            print(table([row for row in rows if row["step"] == model.name]), flush=True)
    where, clock = (f" on {jax.devices()[0].device_kind}", "Time by the clock") if ON_GPU else ("", "Processor time")
    core = "" if ON_GPU else ", one core and one thread"
    notes = [
        f"One worker{where}, two microbatches a step{core}; {args.rounds} rounds of {args.block} steps, "
        f"Adam. {clock}. Ratios are to the same step without a monitor; "
        "more: the median of the differences round by round."
    ]
    path = f"cost_of_monitors{'_on_a_gpu' * ON_GPU}.md" if args.write else None
    report("What monitors cost", rows, path, notes)


if __name__ == "__main__":
    main()
