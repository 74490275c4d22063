"""32 workers under 125 faults an hour: steps committed, relative to a run without faults, and workers taking part.

    python benchmarks/storm.py [--workers 32] [--minutes 30] [--faults-per-hour 125] [--seed 1] [--write]

Faults come at random times (exponential intervals) to random workers: half are kills (SIGKILL); a fifth are SIGTERM,
upon which the worker leaves; a fifth stop the process for 0.5 to 3 s (SIGSTOP, SIGCONT); a tenth hang its Python code
for good, until the others have it killed (`hang_timeout=`). `respawn=True` spawns a replacement for each.

Workers wait 40 ms (`--wait`) for each of their 32 examples, as a host waits for its accelerator, so that a step takes
1.3 s and many processes fit on few cores. The run without faults comes first. Ten
steps are taken before the time begins. The parameters in the end are those of a plain loop.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _elastic import Notes, job
from _measure import command_line, middle, readable, report

import adaptive as ad
import collectives as comm
import controllers as ctrl
from tests.problems import stream

LOCAL_BATCH, EXAMPLES, FEATURES, RATE, SEED = 32, 10_000, 6, 1e-3, 5
HANG_TIMEOUT = 2.0  # killed after twice that, which is more than the longest stop
SETTLED, START_SECONDS = 10, 300.0  # steps before the time begins; and how long they may take
KINDS = {"kill": 0.5, "SIGTERM": 0.2, "stop": 0.2, "hang": 0.1}
SIGNALS = {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "stop": signal.SIGSTOP, "hang": signal.SIGUSR2}


def make_data() -> dict[str, np.ndarray]:
    """Return examples of a linear model."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES))
    return {"x": x, "y": x.sum(1) + rng.normal(size=EXAMPLES)}


def gradient(w: Any, batch: dict[str, Any]) -> Any:
    """Return the gradient of the mean squared error; arrays of JAX or of numpy."""
    return 2 * ((batch["x"] @ w - batch["y"])[:, None] * batch["x"]).mean(0)


def rank(folder: str, workers: int, wait_per_example: float) -> None:
    """Train on this rank until the file `stop` is in the folder."""
    notes, stop = Notes(folder), Path(folder, "stop")
    jax.config.update("jax_enable_x64", True)
    signal.signal(signal.SIGUSR2, lambda *_: [time.sleep(1) for _ in range(3600)])

    def wait(x: Any) -> np.ndarray:
        time.sleep(wait_per_example * len(x))
        return np.float64(stop.exists())

    def driver(w: Any, batch: Any) -> Any:
        told = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float64), batch["y"])
        ctrl.hook(lambda control, told: told and control.stop(), comm.all_reduce(told, op="max"), name="end")
        return w - RATE * comm.all_reduce(gradient(w, batch)), {}

    with comm.world(max_workers=workers, respawn=True, hang_timeout=HANG_TIMEOUT) as world:
        program = ad.Program(driver, jnp.zeros(FEATURES), make_data(), global_batch=workers * LOCAL_BATCH, seed=SEED)
        for number, step in enumerate(program.run()):
            if number == 0:
                notes.take("member", pid=os.getpid())
            if world.rank == 0:
                taking_part = int((np.asarray(step.batch_sizes) > 0).sum())
                notes.take("step", step=step.step, taking_part=taking_part, lost=[loss.seconds for loss in step.lost])
        notes.take("ended", steps=program.steps, w=np.asarray(program.state).tolist())


def storm(args: Any, per_hour: float) -> dict[str, Any]:
    """Run a job with so many faults; return their kinds, its steps in time, and what its processes have in the end."""
    draw, at, faults, seconds = random.Random(args.seed), 0.0, [], 60 * args.minutes
    while per_hour and (at := at + draw.expovariate(per_hour / 3600)) < seconds:
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        faults.append((at, kind, draw.random(), draw.uniform(0.5, 3.0)))
    with job(args.workers, __file__, ["--workers", args.workers, "--wait", args.wait]) as running:
        until = time.monotonic() + START_SECONDS
        while len(running.lines("step")) < SETTLED:
            if time.monotonic() > until or running.process.poll() is not None:
                raise RuntimeError("the job did not begin")
            time.sleep(0.5)
        began = time.monotonic()
        for at, kind, victim, length in faults:
            time.sleep(max(0.0, began + at - time.monotonic()))
            members = {line["pid"] for line in running.lines("member")}
            pids = sorted(pid for pid in members if Path(f"/proc/{pid}/exe").exists())  # a zombie has none
            if running.process.poll() is not None or len(pids) < 2:
                raise RuntimeError(f"{len(pids)} workers are left; the job: {running.process.poll()}")
            pid = pids[int(victim * len(pids))]
            print(f"{at:.0f} s: {kind} of {pid}, one of {len(pids)}", flush=True)
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[kind])
                if kind == "stop":
                    time.sleep(length)
                    os.kill(pid, signal.SIGCONT)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        (running.folder / "stop").touch()
        running.finished()
        steps = {line["step"]: line for line in running.lines("step") if began <= line["t"] < began + seconds}
        run = {"faults": [kind for _, kind, *_ in faults], "load": os.getloadavg()[0]}
        return run | {"steps": list(steps.values()), "ended": running.lines("ended")}


def row(name: str, run: dict[str, Any], usual: int) -> dict[str, object]:
    """Return the cells of a run, beside so many usual steps."""
    seconds, workers = np.transpose([(b["t"] - a["t"], b["taking_part"]) for a, b in pairwise(run["steps"])])
    return {
        "": name, "faults": len(run["faults"]), "steps": len(run["steps"]),
        "of the steps without": f"{100 * len(run['steps']) / usual:.1f} %",
        "a step": readable(float(np.median(seconds))), "longest": readable(seconds.max()),
        "taking part": f"{np.average(workers, weights=seconds):.2f}", "at least": int(workers.min()),
    }  # fmt: skip


def difference(w: Any, steps: int, batch: int) -> float:
    """Return the largest difference from a plain loop over the documented order of the examples."""
    data, plain = make_data(), np.zeros(FEATURES)
    for rows in stream(EXAMPLES, SEED, steps * batch).reshape(steps, -1):
        plain = plain - RATE * gradient(plain, {name: leaf[rows] for name, leaf in data.items()})
    return float(np.abs(np.asarray(w) - plain).max())


def main() -> None:
    args = command_line(
        __doc__, rank=None, workers=32, minutes=30.0, faults_per_hour=125.0, seed=1, wait=(40e-3, "for each example")
    ).parse_args()
    if args.rank:
        rank(args.rank, args.workers, args.wait)
        return
    calm, stormy = storm(args, 0.0), storm(args, args.faults_per_hour)
    rows = [row(name, run, len(calm["steps"])) for name, run in (("without faults", calm), ("storm", stormy))]
    repairs = [1e3 * s for step in stormy["steps"] for s in step["lost"]]
    ended, kinds = stormy["ended"], stormy["faults"]
    alike = all(other["w"] == ended[0]["w"] for other in ended)
    notes = [
        f"{args.workers} processes in each job, on {os.cpu_count()} cores, {args.minutes:g} minutes, "
        f"{1e3 * args.wait:g} ms of waiting for each example; {args.faults_per_hour:g} faults an hour: "
        f"{', '.join(f'{kinds.count(kind)} × {kind}' for kind in KINDS)}; `hang_timeout={HANG_TIMEOUT:g}`.",
        f"{len(repairs)} workers lost; a repair takes {middle(repairs, 1, ' ms')}. All {len(ended)} "
        f"processes at the end have the same parameters: {'yes' if alike else 'NO'}; the largest difference from a "
        f"plain loop is {difference(ended[0]['w'], ended[0]['steps'], args.workers * LOCAL_BATCH):.1e}.",
        f"Load averages at the ends: {calm['load']:.1f} and {stormy['load']:.1f}.",
    ]
    report(f"{args.workers} workers in a storm of {args.faults_per_hour:g} faults an hour", rows, args.write, notes)


if __name__ == "__main__":
    main()
