"""Progress, a sink, the record and all measurements of a step cost at most 1 % of a step of 5 ms (aimed at).

    python benchmarks/watching.py [seconds]

One program has steps of about 5 ms. Runs of some steps with and without all of these alternate. There is one process,
because the processor time of a rank includes MPI's busy waiting for other ranks.
"""

import io
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr

import jax
import numpy as np
import optax
from _loops import OPTIMIZER, conv_net
from _measure import Spread, report

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

STEPS = 2000  # of a run: ten seconds
WATCHED = {
    "nothing": lambda folder: {},
    "TensorBoard": lambda folder: {"log": [ad.log.TensorBoard(f"{folder}/board")]},
    "progress, a table and the record": lambda folder: {
        "progress": True,
        "log": [ad.log.CSV(f"{folder}/run.csv")],
        "record": f"{folder}/run.jsonl",
    },
}


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    model = conv_net("conv net", 64)

    def driver(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, avg_grads)
        ctrl.hook(lambda control, noise: None, noise, every=20)
        ctrl.hook(lambda control, seconds: None, comm.all_gather(mon.compute_seconds()), every=10)
        updates, opt_state = OPTIMIZER.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": comm.all_reduce(loss), "noise": noise.scale}

    state = (model.params, OPTIMIZER.init(model.params))
    steps = {name: [] for name in WATCHED}
    with comm.world() as world, tempfile.TemporaryDirectory() as folder:
        program = ad.Program(driver, state, model.data, global_batch=64, world=world, resizable=False)
        program.warm_up()
        list(program.run(steps=50))
        until = time.monotonic() + seconds
        for number in range(1000):
            names = list(WATCHED)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                began = np.array([time.perf_counter(), time.thread_time(), time.process_time()])
                with redirect_stderr(io.StringIO()):  # no terminal
                    for _ in program.run(steps=STEPS, **WATCHED[name](folder)):
                        pass
                ended = np.array([time.perf_counter(), time.thread_time(), time.process_time()])
                steps[name].append((ended - began) / STEPS)
            if max(comm.all_gather(np.float32(time.monotonic() > until))):
                break
        if world.rank == 0:
            show(steps)


def show(steps):
    base = np.array(steps["nothing"])
    rows = []
    for name, samples in steps.items():
        _, own, all_threads = (np.array(samples) - base).T
        ratio = Spread.of(np.array(samples)[:, 0] / base[:, 0])
        rows.append(
            {
                "watched by": name,
                "a step": f"{1e3 * np.median(np.array(samples)[:, 0]):.2f} ms",
                "of one that nobody watches": f"{ratio.median:.3f} ({ratio.p10:.3f} – {ratio.p90:.3f})",
                "more processor time in the thread of the steps": f"{1e6 * np.median(own):.0f} µs",
                "in all threads": f"{1e6 * np.median(all_threads):.0f} µs",
            }
        )
    report(
        "What logs cost",
        rows,
        "watching.md",
        [
            f"Medians of {len(base)} rounds with the 10th and the 90th percentile; in a round each way runs {STEPS} "
            "steps, beginnings and ends included: threads that are started, files that are opened and closed. "
            f"The load of the machine was {os.getloadavg()[0]:.1f}, of {os.cpu_count()} cores."
        ],
    )


if __name__ == "__main__":
    main()
