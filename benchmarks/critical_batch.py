"""The critical batch that trials measure agrees with the noise scales within a factor that is reported.

    python benchmarks/critical_batch.py --write              # about 30 minutes

Conv nets learn digits and Fashion-MNIST, and a small transformer learns text, with Adam. At three moments of the run
`ctrl.measure_critical_batch` trains branches on the same examples with 1, 4 and 16 times the batch, and multiplies the
learning rate by the square root of the same factor. Its result is compared with the noise scales that the run's
monitors have at that step: over microbatches, over examples, and in the metric of Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import _language_model as language
import flax.linen as nn
import jax
import optax
from _examples import ConvNet, SmallConvNet, load
from _measure import command_line, middle, report
from _timed_models import cross_entropy

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

FACTORS, B2, LARGE_EPS, SEEDS = (1, 4, 16), 0.99, 1e-4, 3
NAMES = {
    "groups": "two microbatches",
    "examples": "examples",
    "divided": "Adam's metric",
    "divided_large_eps": f"Adam's metric, eps = {LARGE_EPS:g}",
}


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
    data = load("digits")
    of_net = classifier(ConvNet(data.classes), data)
    return Task("digits", *of_net, data.train, data.test, 16, 1e-3, (20, 60, 150), 1024)


def fashion() -> Task:
    """Return a small conv net on Fashion-MNIST."""
    data = load("fashion-mnist")
    test = {key: rows[:5000] for key, rows in data.test.items()}
    of_net = classifier(SmallConvNet(10, normalized=True), data)
    return Task("Fashion-MNIST", *of_net, data.train, test, 32, 1e-3, (60, 300, 1200), 8192)


def classifier(net: nn.Module, data: Any) -> tuple[Callable, Callable]:
    """Return a classifier's weights by seed, and its loss."""
    return lambda seed: net.init(jax.random.key(seed), data.train["image"][:1]), cross_entropy(net.apply)


def text() -> Task:
    """Return a transformer on Python's documentation, with a part of the text held out for tests."""
    train, test, n_characters = language.text(32)
    test = {"codes": test["codes"][::4]}
    shape = {"width": 48, "blocks": 1, "context": 32}
    init = lambda seed: language.init(seed, n_characters, **shape, scales=True)  # noqa: E731
    return Task("text", init, language.loss_fn, train, test, 16, 4e-3, (100, 400, 1000), 4096)


TASKS = {"digits": digits, "Fashion-MNIST": fashion, "text": text}


def driver_of(task: Task) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """Return a training step with all monitors of gradient noise."""

    def driver(state: tuple, batch: Any) -> tuple:
        params, opt_state = state
        _, grads, norms = mon.example_norms(task.loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)

        def scale(**options: Any) -> Any:
            return mon.noise_scale(grads, avg_grads, **{"decay": 0.98} | options).scale

        noise = {
            "groups": scale(),
            "examples": scale(per_example=norms),
            "divided": scale(divide_by=mon.adam_scale(opt_state, b2=B2)),
            "divided_large_eps": scale(divide_by=mon.adam_scale(opt_state, b2=B2, eps=LARGE_EPS)),
        }
        optimizer = optax.adam(ad.hyperparameter("lr", task.lr), b2=B2)
        updates, opt_state = optimizer.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), noise

    return driver


def measured(task: Task, seed: int) -> list[dict[str, Any]]:
    """Train once, and return for each moment: task, examples seen, critical batch and noise scales."""
    params = task.init(seed)
    state = (params, optax.adam(task.lr, b2=B2).init(params))
    sizes = {"global_batch": task.batch, "microbatch": task.batch // 2, "seed": seed}
    rows = []
    with ad.Program(driver_of(task), state, task.train, **sizes) as program:
        for moment in task.moments:
            *_, done = program.run(steps=moment - program.steps)
            found = ctrl.measure_critical_batch(
                program,
                lambda state, batch: task.loss_fn(state[0], batch),
                task.test,
                examples=task.examples,
                factors=FACTORS,
                hyperparameters=lambda k: {"lr": task.lr * k**0.5},
            )
            print(f"{task.name}, seed {seed}, step {moment}\n{found}", flush=True)
            row = {"task": task.name, "seen": done.examples, "critical": found.critical}
            rows.append(row | {name: float(done.metrics[name]) for name in NAMES})
    return rows


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the critical batch, and noise scales relative to it, by task and moment; medians over seeds."""
    table = []
    for task, seen in dict.fromkeys((row["task"], row["seen"]) for row in rows):
        of = [row for row in rows if (row["task"], row["seen"]) == (task, seen)]
        critical = {"critical batch": middle((row["critical"] for row in of), None, unknown="no progress")}
        found = {NAMES[name]: middle((row[name] / row["critical"] for row in of), None) for name in NAMES}
        table.append({"": task, "examples seen": f"{seen:,}"} | critical | found)
    return table


def main() -> None:
    """Measure and report."""
    args = command_line(__doc__, only=("", "tasks whose names contain this")).parse_args()
    names = [name for name in TASKS if args.only in name]
    rows = [row for name in names for seed in range(SEEDS) for row in measured(TASKS[name](), seed)]
    notes = [
        f"Medians over {SEEDS} seeds (least – most); the critical batch in examples, noise scales relative to it. "
        "Branches of 1, 4 and 16 times the batch, learning rate times the root. Adam with b2 = 0.99; averages of a "
        'decay of 0.98. "2 of 3": in the other seed the base branch ended with a higher test loss than it began with, '
        "so the trials say nothing."
    ]
    report("Noise scale over critical batch", ratios(rows), args.write, notes)


if __name__ == "__main__":
    main()
