"""The critical batch that trials measure agrees with the noise scales within a factor that is reported.

    python benchmarks/critical_batch.py --write              # about 20 minutes, one process
    python benchmarks/critical_batch.py --draw               # only tables and picture, from the stored results

A conv net learns digits, and a small transformer learns text, with Adam. At three moments of the run
`ctrl.measure_critical_batch` trains branches on the same examples with 1, 4 and 16 times the batch, and multiplies the
learning rate by the square root of the same factor. Its result is compared with the noise scales that the run's
monitors have at that step: over microbatches, over examples, in the metrics of Adam, of sign descent and of Muon, and
from Adam's moments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import _language_model as language
import jax
import numpy as np
import optax
from _measure import RESULTS, report

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

FACTORS, B2 = (1, 4, 16), 0.99
NAMES = {
    "groups": "two microbatches",
    "examples": "examples",
    "divided": "Adam's metric",
    "sign": "sign",
    "spectral": "spectral",
    "moments": "moments, Euclidean",
    "moments_adam": "moments, Adam",
    "moments_sign": "moments, sign",
}
FOUND = RESULTS / "critical_batch.json"


class Task(NamedTuple):
    """A model and its data, and the steps at which its critical batch is measured."""

    name: str
    init: Callable[[int], Any]  # weights, of a seed
    loss_fn: Callable[[Any, Any], jax.Array]
    train: Any
    test: Any
    batch: int
    lr: float
    moments: tuple[int, ...]  # in steps
    examples: int  # of each branch


def digits() -> Task:
    """Return the examples' conv net on handwritten digits."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from _data import load
    from _models import ConvNet

    data = load("digits")
    net = ConvNet(data.classes)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = net.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def init(seed: int) -> Any:
        return net.init(jax.random.key(seed), data.train["image"][:1])

    return Task("digits", init, loss_fn, data.train, data.test, 16, 1e-3, (20, 60, 150), 1024)


def text() -> Task:
    """Return a transformer on Python's documentation, with a part of the text held out for tests."""
    train, test, n_characters = language.text()
    test = {"codes": test["codes"][::3]}
    init = lambda seed: language.init(seed, n_characters)  # noqa: E731
    return Task("text", init, language.loss_fn, train, test, 16, 2e-3, (100, 300, 600), 4096)


def driver_of(task: Task) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """Return a training step with all monitors of gradient noise."""

    def driver(state: tuple, batch: Any) -> tuple:
        params, opt_state = state
        _, grads, norms = mon.example_norms(task.loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        divisor = mon.adam_scale(opt_state, b2=B2)
        moments = mon.moment_noise(opt_state, b2=B2)
        noise = {
            "groups": mon.noise_scale(grads, avg_grads, decay=0.98).scale,
            "examples": mon.noise_scale(grads, avg_grads, per_example=norms, decay=0.98).scale,
            "divided": mon.noise_scale(grads, avg_grads, divide_by=divisor, decay=0.98).scale,
            "sign": mon.noise_scale(grads, avg_grads, metric="sign", decay=0.98).scale,
            "spectral": mon.noise_scale(grads, avg_grads, metric="spectral", decay=0.98).scale,
            "moments": moments.euclidean.scale,
            "moments_adam": moments.adam.scale,
            "moments_sign": moments.sign.scale,
        }
        optimizer = optax.adam(ad.hyperparameter("lr", task.lr), b2=B2)
        updates, opt_state = optimizer.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), noise

    return driver


def measured(task: Task, seed: int) -> list[dict[str, Any]]:
    """Train once, and return for each moment: task, seed, examples seen, critical batch and noise scales."""
    params = task.init(seed)
    state = (params, optax.adam(task.lr, b2=B2).init(params))
    sizes = {"global_batch": task.batch, "microbatch": task.batch // 2, "seed": seed}
    rows = []
    with ad.Program(driver_of(task), state, task.train, **sizes) as program:
        for moment in task.moments:
            reports = list(program.run(steps=moment - program.steps))
            done = reports[-1]
            found = ctrl.measure_critical_batch(
                program,
                lambda state, batch: task.loss_fn(state[0], batch),
                task.test,
                examples=task.examples,
                factors=FACTORS,
                hyperparameters=lambda k: {"lr": task.lr * k**0.5},
            )
            print(f"{task.name}, seed {seed}, step {moment}\n{found}", flush=True)
            row = {"task": task.name, "seed": seed, "seen": done.examples, "critical": found.critical}
            row["losses"] = [found.start_loss, *(branch.loss for branch in found.branches)]
            row["series"] = [{"seen": r.examples} | scales_in(r.metrics) for r in reports[4::5]]
            rows.append(row | scales_in(done.metrics))
    return rows


def scales_in(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the noise scales among the metrics of a step, to three digits."""
    return {name: float(f"{float(metrics[name]):.3g}") for name in NAMES}


def middle(values: Iterable[float], unknown: str = "–") -> str:
    """Format the median of values and their range; `unknown` if one is NaN."""
    array = np.asarray(list(values), np.float64)
    if np.isnan(array).any():
        return unknown
    median, least, most = (_readable(v) for v in (np.median(array), array.min(), array.max()))
    return f"{median} ({least} – {most})"


def _readable(value: float) -> str:
    return f"{value:,.0f}" if 10 <= value < 1e6 else f"{value:.2g}"


def tables(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the scales and their ratios to the critical batch, by task and moment; medians over seeds."""
    scales, ratios = [], []
    for task, seen in dict.fromkeys((row["task"], row["seen"]) for row in rows):
        of = [row for row in rows if (row["task"], row["seen"]) == (task, seen)]
        place = {"": task, "examples seen": f"{seen:,}"}
        critical = {"critical batch": middle((row["critical"] for row in of), "no progress")}
        scales.append(place | critical | {NAMES[n]: middle(row[n] for row in of) for n in NAMES})
        ratios.append(place | {NAMES[n]: middle(row[n] / row["critical"] for row in of) for n in NAMES})
    return scales, ratios


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw noise scales over the examples seen, and the critical batch: a panel per task, medians over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.5 * len(tasks), 4.5), squeeze=False)
    for ax, task in zip(axes[0], tasks, strict=True):
        of = [row for row in rows if row["task"] == task]
        moments = sorted({row["seen"] for row in of})
        steps = [step for row in of for step in row["series"]]
        seen = sorted({step["seen"] for step in steps})
        for number, (key, label) in enumerate(NAMES.items()):
            medians = [np.median([step[key] for step in steps if step["seen"] == s]) for s in seen]
            ax.plot(seen, medians, color=f"C{number}", linewidth=1.3, label=label)
        medians = [np.median([row["critical"] for row in of if row["seen"] == m]) for m in moments]
        ax.plot(moments, medians, "k", linewidth=3, label="measured by trials")
        ax.plot([row["seen"] for row in of], [row["critical"] for row in of], "k.")
        ax.set(title=task, xlabel="examples seen", ylabel="examples", xscale="log", yscale="log", ylim=(4, 2e4))
        ax.set_xticks(moments, [f"{m:,}" for m in moments])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0, -1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="tasks whose names contain this")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--draw", action="store_true", help="from the file of the last measurement")
    args = parser.parse_args()
    if args.draw:
        rows = json.loads(FOUND.read_text())
    else:
        tasks = [task for task in (digits(), text()) if args.only in task.name]
        rows = [row for seed in range(args.seeds) for task in tasks for row in measured(task, seed)]
    rows.sort(key=lambda row: (row["task"], row["seen"], row["seed"]))
    scales, ratios = tables(rows)
    keep = args.write or args.draw
    if keep:
        FOUND.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        draw(rows, FOUND.with_suffix(".png"))
    notes = [
        f"Medians over {len({row['seed'] for row in rows})} seeds (least – most), in examples. Branches of 1, 4 and 16 "
        "times the batch, learning rate times the root. Adam with b2 = 0.99; averages of a decay of 0.98."
    ]
    report("Critical batch and noise scales", scales, "critical_batch.md" if keep else None, notes)
    report("Noise scale over critical batch", ratios, "critical_batch_ratios.md" if keep else None, notes)


if __name__ == "__main__":
    main()
