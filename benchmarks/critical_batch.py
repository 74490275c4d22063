"""The critical batch that trials measure agrees with the noise scales within a factor that is reported.

    python benchmarks/critical_batch.py                      # for 8 minutes at most; repeat until all seeds are done
    python benchmarks/critical_batch.py --write              # tables and picture, from the stored results

Conv nets learn digits and Fashion-MNIST, and a small transformer learns text, with Adam. At three moments of the run
`ctrl.measure_critical_batch` trains branches on the same examples with 1, 4 and 16 times the batch, and multiplies the
learning rate by the square root of the same factor. Its result is compared with the noise scales that the run's
monitors have at that step: over microbatches, over examples, from norm layers, in the metrics of Adam, of sign descent
and of Muon, and from Adam's moments. Digits has no norm layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import _language_model as language
import flax.linen as nn
import jax
import numpy as np
import optax
from _measure import RESULTS, report

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load
from _models import ConvNet

FACTORS, B2, LARGE_EPS, SPECTRAL_EVERY, SEEDS = (1, 4, 16), 0.99, 1e-4, 5, 3
NAMES = {
    "groups": "two microbatches",
    "examples": "examples",
    "norm_layers": "norm layers",
    "divided": "Adam's metric",
    "divided_large_eps": f"Adam's metric, eps = {LARGE_EPS:g}",
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
    norm_layers: bool  # whether the model has any


def digits() -> Task:
    """Return the examples' conv net on handwritten digits."""
    data = load("digits")
    init, loss_fn = classifier(ConvNet(data.classes), data)
    return Task("digits", init, loss_fn, data.train, data.test, 16, 1e-3, (20, 60, 150), 1024, False)


class NormalizedConvNet(nn.Module):
    """Two layers of convolution with layer normalization: 21 thousand parameters."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.relu(nn.LayerNorm()(nn.Conv(16, (5, 5), strides=2)(image)))
        x = nn.relu(nn.LayerNorm()(nn.Conv(32, (3, 3), strides=2)(x)))
        return nn.Dense(10)(x.reshape(len(x), -1))


def fashion() -> Task:
    """Return a small conv net on Fashion-MNIST."""
    data = load("fashion-mnist")
    init, loss_fn = classifier(NormalizedConvNet(), data)
    test = {key: rows[:5000] for key, rows in data.test.items()}
    return Task("Fashion-MNIST", init, loss_fn, data.train, test, 32, 1e-3, (60, 300, 1200), 8192, True)


def classifier(net: nn.Module, data: Any) -> tuple[Callable, Callable]:
    """Return a classifier's weights by seed, and its loss."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = net.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return lambda seed: net.init(jax.random.key(seed), data.train["image"][:1]), loss_fn


def text() -> Task:
    """Return a transformer on Python's documentation, with a part of the text held out for tests."""
    train, test, n_characters = language.text(32)
    test = {"codes": test["codes"][::4]}
    shape = {"width": 48, "blocks": 1, "context": 32}
    init = lambda seed: language.init(seed, n_characters, **shape, scales=True)  # noqa: E731
    return Task("text", init, language.loss_fn, train, test, 16, 4e-3, (100, 400, 1000), 4096, True)


TASKS = {"digits": digits, "Fashion-MNIST": fashion, "text": text}


def driver_of(task: Task) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """Return a training step with all monitors of gradient noise."""

    def driver(state: tuple, batch: Any) -> tuple:
        params, opt_state = state
        _, grads, norms = mon.example_norms(task.loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)

        def scale(**options: Any) -> Any:
            return mon.noise_scale(grads, avg_grads, **{"decay": 0.98} | options).scale

        moments = mon.moment_noise(opt_state, b2=B2)
        noise = {
            "groups": scale(),
            "examples": scale(per_example=norms),
            "divided": scale(divide_by=mon.adam_scale(opt_state, b2=B2)),
            "divided_large_eps": scale(divide_by=mon.adam_scale(opt_state, b2=B2, eps=LARGE_EPS)),
            "sign": scale(metric="sign"),
            "spectral": scale(metric="spectral", every=SPECTRAL_EVERY, decay=0.98**SPECTRAL_EVERY),
            "moments": moments.euclidean.scale,
            "moments_adam": moments.adam.scale,
            "moments_sign": moments.sign.scale,
        }
        if task.norm_layers:
            _, _, few = mon.example_norms(task.loss_fn, full_every=100)(params, batch)
            noise["norm_layers"] = scale(per_example=few)
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
    return {name: float(f"{float(metrics[name]):.3g}") for name in NAMES if name in metrics}


def middle(values: Iterable[float], unknown: str = "–") -> str:
    """Format the median of the known values, their range, and how many are known; `unknown` if none is."""
    array = np.asarray(list(values), np.float64)
    known = array[~np.isnan(array)]
    if not len(known):
        return unknown
    median, least, most = (_readable(v) for v in (np.median(known), known.min(), known.max()))
    return f"{median} ({least} – {most})" + f", {len(known)} of {len(array)}" * (len(known) < len(array))


def _readable(value: float) -> str:
    return f"{value:,.0f}" if 10 <= value < 1e6 else f"{value:.2g}"


def tables(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the scales and their ratios to the critical batch, by task and moment; medians over seeds."""
    scales, ratios = [], []
    for task, seen in dict.fromkeys((row["task"], row["seen"]) for row in rows):
        of = [row for row in rows if (row["task"], row["seen"]) == (task, seen)]
        place = {"": task, "examples seen": f"{seen:,}"}
        critical = {"critical batch": middle((row["critical"] for row in of), "no progress")}
        scales.append(place | critical | {NAMES[n]: middle(row.get(n, np.nan) for row in of) for n in NAMES})
        ratios.append(place | {NAMES[n]: middle(row.get(n, np.nan) / row["critical"] for row in of) for n in NAMES})
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
            medians = [np.median([step.get(key, np.nan) for step in steps if step["seen"] == s]) for s in seen]
            ax.plot(seen, medians, color=f"C{number}", linewidth=1.3, label=label)
        medians = [np.nanmedian([row["critical"] for row in of if row["seen"] == m]) for m in moments]
        ax.plot(moments, medians, "k", linewidth=3, label="measured by trials")
        ax.plot([row["seen"] for row in of], [row["critical"] for row in of], "k.")
        ax.set(title=task, xlabel="examples seen", ylabel="examples", xscale="log", yscale="log", ylim=(4, 2e4))
        ax.set_xticks(moments, [f"{m:,}" for m in moments])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0, -1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def save(rows: list[dict[str, Any]]) -> None:
    """Write rows to the file, sorted."""
    rows.sort(key=lambda row: (row["task"], row["seen"], row["seed"]))
    FOUND.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def main() -> None:
    """Measure what is missing, or report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="no seed starts later")
    parser.add_argument("--only", default="", help="tasks whose names contain this")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows, until = json.loads(FOUND.read_text()) if FOUND.exists() else [], time.monotonic() + 60 * args.minutes
    done = {(row["task"], row["seed"]) for row in rows}
    for seed, name in [(seed, name) for seed in range(SEEDS) for name in TASKS if args.only in name]:
        if not args.write and (name, seed) not in done and time.monotonic() < until:
            rows += measured(TASKS[name](), seed)
            save(rows)
    scales, ratios = tables(rows)
    if args.write:
        draw(rows, FOUND.with_suffix(".png"))
    notes = [
        f"Medians over {SEEDS} seeds (least – most), in examples. Branches of 1, 4 and 16 times the batch, learning "
        'rate times the root. Adam with b2 = 0.99; averages of a decay of 0.98. "2 of 3": in the other seed the base '
        "branch ended with a higher test loss than it began with, so the trials say nothing."
    ]
    report("Critical batch and noise scales", scales, "critical_batch.md" if args.write else None, notes)
    report("Noise scale over critical batch", ratios, "critical_batch_ratios.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
