"""Compare predictors of a worker's speed with and without the free resources of the machine as inputs: ARX and NARX.

    python benchmarks/speed_predictors.py              # evaluates the committed record
    python benchmarks/speed_predictors.py --record     # records anew, in 4 minutes, on one core of this machine (Linux)

Predictors of `controllers` run one step ahead on two kinds of series. One is synthetic with known noise: the speed of a
machine with other users (the shares of processor and memory jump, sensors have 2 % noise, and the speed 3 % noise). The
other is recorded: a program trains a conv net with varying batches on one core, while two processes on that core start,
stop and throttle themselves at random, and allocate memory. For each step the record has its seconds, and the values of
`mon.cpu_available()` and `mon.memory_available()` at its start.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("PJRT_NPROC", "1")

import numpy as np
from _measure import RESULTS, Spread, alternate, pin, report

import controllers as ctrl
from controllers.simulate._draw import BLUE, GREY, INK, new_figure, tidy

RECORD = RESULTS / "speeds_under_load.csv"
SEEDS, STEPS, LEARNT = 5, 2000, 500
PREDICTORS = {
    "memoryless": ctrl.published.memoryless(),
    "moving average 0.2": ctrl.published.moving_average(0.2),
    "moving average 0.5": ctrl.published.moving_average(0.5),
    "AR(2)": ctrl.published.arx(),
    "ARX(2)": ctrl.published.arx(),
    "NARX(2)": ctrl.published.narx(),
    "best of ARX, NARX, average": ctrl.published.best_of(
        ctrl.published.moving_average(), ctrl.published.arx(), ctrl.published.narx()
    ),
}
BLIND = ("AR(2)",)  # shown no inputs
BASE = "moving average 0.5"


# --- series -----------------------------------------------------------------------------------------------------------


def made_up(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic speeds, shape=(1, STEPS), and inputs, shape=(1, STEPS, 2)."""
    rng = np.random.default_rng(seed)
    cpu, memory = np.empty(STEPS), np.empty(STEPS)
    level = room = 1.0
    for k in range(STEPS):
        level = rng.uniform(0.2, 1) if rng.random() < 0.04 else level
        room = rng.uniform(0.1, 1) if rng.random() < 0.02 else room
        cpu[k], memory[k] = level, room
    speed = 100 * cpu**0.8 * (1 - 0.5 * np.exp(-memory / 0.2)) * (1 + 0.03 * rng.standard_normal(STEPS))
    seen = np.stack([cpu, memory], axis=1) * (1 + 0.02 * rng.standard_normal((STEPS, 2)))
    return speed[None], seen[None]


def recorded() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return speeds, inputs and batch sizes of the committed record."""
    size, seconds, cpu, memory = np.loadtxt(RECORD, delimiter=",", comments="#", skiprows=2).T
    return (size / seconds)[None], np.stack([cpu, memory], axis=1)[None], size


def predictions(name: str, speeds: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Return the prediction for each step from those before it; shape as `speeds`."""
    if name in BLIND:
        inputs = inputs[:, :, :0]
    predictor = PREDICTORS[name]
    state, latest = predictor.init(len(speeds), inputs.shape[2]), np.full(len(speeds), np.nan)
    said = np.empty(speeds.shape)
    for k in range(speeds.shape[1]):
        said[:, k], state = predictor.update(state, latest, inputs[:, k])
        latest = speeds[:, k]
    return said


def error(said: np.ndarray, speeds: np.ndarray) -> float:
    """Return the root mean square error over the mean, after the first LEARNT steps."""
    off = (said - speeds)[:, LEARNT:]
    return float(np.sqrt((off**2).mean()) / speeds[:, LEARNT:].mean())


# --- recording --------------------------------------------------------------------------------------------------------

_LOAD = """
import os, random, sys, time
parent, core, seed = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
draw = random.Random(seed)
print("ready", flush=True)
while os.getppid() == parent:  # an orphan stops by itself
    duty = draw.choice([0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
    held = bytearray(draw.choice([0, 0, 50, 100, 200]) * 2**20 if duty else 0)
    end = time.monotonic() + draw.expovariate(1 / 2.0)
    while (start := time.monotonic()) < end:
        while time.monotonic() - start < 0.02 * duty:
            pass
        time.sleep(0.02 * (1 - duty) + (0.001 if duty < 1 else 0.0))
"""


def record(core: int, seconds: float = 240.0) -> None:
    """Train on a core with varying load, and write speeds and the monitors' values."""
    pin(core)
    load = os.getloadavg()[0]
    program = _program()
    program.warm_up()
    list(program.run(steps=20))
    neighbors = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LOAD, str(os.getpid()), str(core), str(seed)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    try:
        for child in neighbors:
            child.stdout.readline()
        end, rows = time.monotonic() + seconds, []
        while time.monotonic() < end:
            rows += [(r.batch_sizes[0], r.compute_seconds[0], r.metrics["cpu"], r.metrics["memory"])
                     for r in program.run(steps=20)]  # fmt: skip
    finally:
        for child in neighbors:
            child.kill()
            child.wait()
    with RECORD.open("w") as file:
        file.write(f"# A conv net's training on one core under changing load. Load of the machine before: {load:.2f}\n")
        file.write("examples,compute_seconds,cpu_available,memory_available\n")
        file.writelines(f"{b},{t:.6f},{c:.4f},{m / 2**20:.1f}\n" for b, t, c, m in rows)


def _program():
    """Return the conv net of the examples, with batches whose size changes every 40 steps."""
    import jax
    import optax

    import adaptive as ad
    import collectives as comm
    import monitors as mon

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from _models import ConvNet

    rng = np.random.default_rng(0)
    data = {"image": rng.random((8192, 8, 8, 1), np.float32), "label": rng.integers(0, 10, 8192).astype(np.int32)}
    net, optimizer = ConvNet(10), optax.adam(1e-3)
    params = net.init(jax.random.key(0), data["image"][:1])

    def loss_fn(params, batch):
        logits = net.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def driver(state, batch):
        params, opt_state = state
        grads = comm.all_reduce(jax.grad(loss_fn)(params, batch))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        seen = comm.all_gather(mon.cpu_available()), comm.all_gather(mon.memory_available())
        ctrl.hook(ctrl.schedule(lambda step: int(sizes[step // 40 % len(sizes)])))
        return (optax.apply_updates(params, updates), opt_state), {"cpu": seen[0][0], "memory": seen[1][0]}

    sizes = rng.choice([1024, 1536, 2048, 3072], 1000)
    return ad.Program(driver, (params, optimizer.init(params)), data, global_batch=1024)


# --- results ----------------------------------------------------------------------------------------------------------


def cost(workers: int = 8, rounds: int = 400) -> dict[str, Spread]:
    """Return the seconds per step of each predictor in turn, for a number of workers."""
    speeds, inputs = (np.concatenate(parts) for parts in zip(*(made_up(s) for s in range(workers)), strict=True))
    states, at = (
        {n: p.init(workers, 0 if n in BLIND else 2) for n, p in PREDICTORS.items()},
        dict.fromkeys(PREDICTORS, 0),
    )

    def step(name: str) -> None:
        k = at[name] = at[name] + 1
        seen = inputs[:, k, :0] if name in BLIND else inputs[:, k]
        _, states[name] = PREDICTORS[name].update(states[name], speeds[:, k - 1], seen)

    calls = {name: lambda name=name: step(name) for name in PREDICTORS}
    return {name: Spread.of(sample) for name, sample in alternate(calls, rounds, warmup=100).items()}


def draw(table: dict[str, list[float]], on_record: dict[str, float], speeds: np.ndarray, cpu: np.ndarray) -> None:
    """Draw the errors of both kinds, and a minute of the record."""
    figure = new_figure(9.0, 5.2)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    made, real = top.subplots(1, 2, sharey=True)
    at = np.arange(len(table))[::-1]
    made.plot([np.mean(v) for v in table.values()], at, "o", color=BLUE)
    for y, values in zip(at, table.values(), strict=True):
        made.plot([min(values), max(values)], [y, y], color=BLUE, linewidth=1.2)
    real.plot(list(on_record.values()), at, "o", color=BLUE)
    made.set_yticks(at, list(table))
    for axes, title in ((made, "made-up series (mean and range of seeds)"), (real, "recorded here, under load")):
        tidy(axes)
        axes.grid(axis="x", color="#eceef1", linewidth=0.7)
        axes.set_xlim(left=0)
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        axes.set_xlabel("error of the predicted speed: root mean square / mean", fontsize=8)
    axes = bottom.subplots()
    axes.plot(speeds[0] / speeds[0].max(), color=BLUE, linewidth=0.6, label="speed, of its largest")
    axes.plot(cpu, color=INK, linewidth=0.8, label="processor share left by others")
    axes.axvspan(0, LEARNT, color=GREY, alpha=0.25, linewidth=0, label="learning only")
    tidy(axes)
    axes.set_ylim(0, 1.25)
    axes.set_xlim(0, len(cpu))
    axes.legend(ncols=3, fontsize=7, frameon=False, loc="upper right")
    axes.set_xlabel("step of the record", fontsize=8)
    figure.savefig(RESULTS / "speed_predictors.png", dpi=110)


def main() -> None:
    """Evaluate; with `--record`, record first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="record speeds under load anew")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="for the recording")
    options = parser.parse_args()
    if options.record:
        cores = os.sched_getaffinity(0)
        record(options.core)
        pin(*cores)
    made = [made_up(seed) for seed in range(SEEDS)]
    table = {name: [error(predictions(name, *series), series[0]) for series in made] for name in PREDICTORS}
    speeds, inputs, sizes = recorded()
    on_record = {name: error(predictions(name, speeds, inputs), speeds) for name in PREDICTORS}
    seconds = cost()
    rows = [
        {
            "predictor": name,
            "made up: error": f"{np.mean(values):.3f} ± {np.std(values):.3f}",
            "of average 0.5": f"{np.mean(np.array(values) / np.array(table[BASE])):.2f}",
            "worst of 5 seeds": f"{np.max(np.array(values) / np.array(table[BASE])):.2f}",
            "recorded: error": f"{on_record[name]:.3f}",
            "of average 0.5 ": f"{on_record[name] / on_record[BASE]:.2f}",
            "µs a step, 8 workers": f"{1e6 * seconds[name].median:.0f}",
        }
        for name, values in table.items()
    ]
    draw(table, on_record, speeds, inputs[0, :, 0])
    load = RECORD.read_text().partition("\n")[0].rpartition(": ")[2]
    share, memory = inputs[0].T
    notes = [
        "![Errors, and the record](speed_predictors.png)",
        f"One step ahead; root mean square error over mean speed, behind the first {LEARNT} steps. Made up: {STEPS} "
        f"steps, {SEEDS} seeds. AR(2) sees no inputs.",
        f"Recorded: {speeds.shape[1]} steps of {sizes.min():.0f} to {sizes.max():.0f} examples, speeds from "
        f"{np.quantile(speeds, 0.05):.0f} to {np.quantile(speeds, 0.95):.0f} examples a second (5 and 95 %); the share "
        f"of the core that was left ranged from {np.nanquantile(share, 0.05):.2f} to {np.nanquantile(share, 0.95):.2f} "
        f"and its correlation with the speed is {np.corrcoef(np.nan_to_num(share, nan=1.0), speeds[0])[0, 1]:.2f}; "
        f"with free memory it is {np.corrcoef(memory, speeds[0])[0, 1]:.2f}. What the monitor says is the mean of the "
        f"last tenth of a second or more. Load of the machine before: {load}.",
    ]
    report(
        "Knowing the machine, against knowing the past: errors of predicted speeds", rows, "speed_predictors.md", notes
    )


if __name__ == "__main__":
    main()
