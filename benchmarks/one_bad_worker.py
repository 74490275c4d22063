"""One of five workers sends -100 times its gradient: the mean fails, and robust reductions do not.

    python benchmarks/one_bad_worker.py

Five workers train an MLP on digits with each reduction of `synchronous(optimizer, op=…)`, without and with the bad
worker, and with three seeds for the parameters and the order of examples. Accuracies are on 360 test digits, of which
one is 0.3 %.

The target: with a bad worker the mean fails, and each other reduction is within 1 % of the mean without one.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import RESULTS, report

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
from adaptive.runtime.local_world import LocalWorld

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load

WORKERS, BAD, LOCAL_BATCH, EPOCHS, SEEDS = 5, 4, 32, 20, (0, 1, 2)
OPS = {
    "mean": "mean",
    "median": "median",
    "trimmed mean (1)": comm.trimmed_mean(1),
    "geometric median": comm.geometric_median(),
}
TRAIN, TEST, CLASSES, _ = load("digits")


def flat(image):
    return image.reshape(len(image), -1)


def first_params(seed):
    rng = np.random.default_rng(seed)
    sizes = [64, 64, CLASSES]
    return [
        {"w": rng.normal(size=(a, b), scale=(2 / a) ** 0.5).astype(np.float32), "b": np.zeros(b, np.float32)}
        for a, b in pairwise(sizes)
    ]


def logits_of(params, image):
    hidden = jax.nn.relu(flat(image) @ params[0]["w"] + params[0]["b"])
    return hidden @ params[1]["w"] + params[1]["b"]


def loss_fn(params, batch):
    logits = logits_of(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def gradient(params, batch, bad):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    factor = jnp.where(bad & (ad.worker_index() == BAD), -100.0, 1.0)
    return loss, jax.tree.map(lambda g: factor * g, grads)


def accuracy(op, bad: bool, seed: int) -> float:
    """Return the test accuracy after training; NaN if the model became NaN."""
    strategy = sync.synchronous(optax.sgd(0.1, momentum=0.9), op=op)

    def driver(state, batch):
        state, loss = strategy.step(state, lambda p, b: gradient(p, b, bad), batch)
        return state, {"loss": comm.all_reduce(loss)}

    program = ad.Program(
        driver,
        strategy.init(first_params(seed)),
        TRAIN,
        global_batch=WORKERS * LOCAL_BATCH,
        world=LocalWorld(WORKERS),
        seed=seed,
        resizable=False,
        nonfinite="allow",
    )

    def correct(state, batch):
        return jnp.mean(logits_of(strategy.model(state), batch["image"]).argmax(-1) == batch["label"])

    try:
        for _ in program.run(epochs=EPOCHS):
            pass
        return float(program.evaluate(correct, TEST))
    except ad.NonFiniteError:
        return float("nan")
    finally:
        program.close()


def percent(values) -> str:
    return ", ".join("not finite" if np.isnan(v) else f"{v:.1%}" for v in values)


def main() -> None:
    sound = {name: [accuracy(op, False, seed) for seed in SEEDS] for name, op in OPS.items()}
    attacked = {name: [accuracy(op, True, seed) for seed in SEEDS] for name, op in OPS.items()}
    best = np.mean(sound["mean"])
    rows = [
        {
            "op": name,
            "all sound": percent(sound[name]),
            "one bad": percent(attacked[name]),
            "one bad, mean": percent([np.mean(attacked[name])]),
            "less than the sound mean": f"{100 * (best - np.mean(attacked[name])):.1f} points",
        }
        for name in OPS
    ]
    notes = [
        f"{WORKERS} workers of {LOCAL_BATCH} examples each, {EPOCHS} epochs of {len(TRAIN['label'])} digits, an MLP of "
        f"64 hidden units, SGD with momentum; worker {BAD} sends -100 times its gradient. Seeds {SEEDS}."
    ]
    report("One bad worker among five", rows, RESULTS / "one_bad_worker.md", notes)


if __name__ == "__main__":
    main()
