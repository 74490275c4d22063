"""On a fast link synchronization strategies differ little; on a slow link those that send less learn sooner.

    python benchmarks/strategies_side_by_side.py

Four workers train a net of dense layers (0.6 million parameters) on digits with each strategy, for the same seconds of
steps, alternating in blocks: on one host, and as two ranks on each of two hosts (network namespaces of this machine:
Linux and root) joined at 100 Mbit/s (`--rate`). All updates have the same number of examples on each worker and the
same learning rate. Accuracy on held-out digits is that of `strategy.model`; for pairs, that of the replicas' mean.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _examples import load
from _hosts import job, joined, tell
from _measure import command_line, middle, report
from _timed_models import cross_entropy

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
import controllers as ctrl

WORKERS, LOCAL_STEPS, SIZE = 4, 8, 16  # SIZE: examples of a worker in an update
BLOCK = 2.0  # seconds
SGD = optax.sgd(0.05)
STRATEGIES = {
    "synchronous": sync.synchronous(SGD),
    "synchronous, bfloat16 on the wire": sync.synchronous(SGD, wire=jnp.bfloat16),
    "model_averaging": sync.model_averaging(SGD),
    "pair_averaging": sync.pair_averaging(SGD),
    f"local_steps, {LOCAL_STEPS}": sync.local_steps(SGD, steps=LOCAL_STEPS),
    f"diloco, {LOCAL_STEPS}": sync.diloco(SGD, optax.sgd(0.7, momentum=0.5, nesterov=True), steps=LOCAL_STEPS),
    "hybrid": sync.hybrid(sync.model_averaging(SGD), sync.synchronous(SGD)),
}


TRAIN, TEST, CLASSES, _ = load("digits")
DENSE = [layer for _ in range(3) for layer in (nn.Dense(512), nn.relu)]
NET = nn.Sequential([lambda image: image.reshape(len(image), -1), *DENSE, nn.Dense(CLASSES)])
LOSS = jax.value_and_grad(cross_entropy(NET.apply))


@jax.jit
def accuracy(params: Any) -> jax.Array:
    return jnp.mean(NET.apply(params, TEST["image"]).argmax(-1) == TEST["label"])


def when_it_learns(control: Any, loss: float) -> None:
    if loss < 0.5:
        control.set_hyperparameters(synchronous=True)


class Run:
    """A program, and its progress in its seconds. Replicated on all ranks."""

    def __init__(self, world: Any, name: str, seed: int):
        self.world, self.strategy = world, STRATEGIES[name]
        self.updates = LOCAL_STEPS if self.strategy.replica is None else 1  # in a step of the program

        def driver(state: Any, batch: Any) -> Any:
            state, loss = self.strategy.step(state, LOSS, batch)
            loss = comm.all_reduce(loss)
            if self.strategy.name == "hybrid":
                ctrl.hook(when_it_learns, loss)
            return state, {"loss": loss}

        params = NET.init(jax.random.key(seed), TRAIN["image"][:1])
        batch = WORKERS * SIZE * self.updates
        options = {"per_worker_state": self.strategy.per_worker_state, "world": world, "resizable": False, "seed": seed}
        self.program = ad.Program(driver, self.strategy.init(params), TRAIN, global_batch=batch, **options)
        self.program.warm_up()
        self.program.step()  # which is slower than all others
        self.seconds, self.steps, self.curve = 0.0, 0, [(0.0, 0.1)]

    def block(self, most: float) -> None:
        """Take steps for some seconds by rank 0's clock."""
        until = min(self.seconds + BLOCK, most)
        while self.seconds < until:
            done = self.program.step()
            self.seconds, self.steps = self.seconds + done.seconds, self.steps + 1
            self.seconds = float(self.world.all_gather_bytes(str(self.seconds).encode())[0])
        if self.strategy.name == "pair_averaging":
            model = sync.average(self.program, self.strategy)
        else:
            model = self.strategy.model(self.program.state)
        self.curve.append((self.seconds, float(accuracy(model))))


def rank(seconds: float, seeds: int) -> None:
    """Run the strategies with each seed, on this rank."""
    found: dict[str, list[Any]] = {name: [] for name in STRATEGIES}
    with comm.world() as world:
        for seed in range(seeds):
            runs = {name: Run(world, name, seed) for name in STRATEGIES}
            for _ in range(round(seconds / BLOCK)):
                for run in runs.values():
                    run.block(seconds)
            for name, run in runs.items():
                found[name].append([run.updates * run.steps / run.seconds, run.curve])
                run.program.close()
        if world.rank == 0:
            tell(found)


def rows(found: dict[str, list[Any]], where: str, seconds: float) -> list[dict[str, str]]:
    """Return the rows of one setting, one per strategy."""
    rates = {name: np.array([rate for rate, _ in seeds]) for name, seeds in found.items()}
    table = []
    for name, of_seeds in found.items():
        row = {"": name, "workers are": where, "updates/s": f"{rates[name].mean():.0f}"}
        row["to synchronous"] = middle(rates[name] / rates["synchronous"])
        for when in (seconds / 4, seconds):
            at = [np.interp(when, *zip(*curve, strict=True)) for _, curve in of_seeds]
            row[f"accuracy after {when:g} s"] = " ".join(f"{share:.1%}" for share in at)
        table.append(row)
    return table


def main() -> None:
    args = command_line(
        __doc__,
        rank=(False, "the part of one rank"),
        seconds=(8.0, "of steps, of each strategy"),
        seeds=3,
        rate=("100mbit", "of the hosts' links, as tc reads it"),
    ).parse_args()
    if args.rank:
        rank(args.seconds, args.seeds)
        return
    own = ["--rank", "--seconds", str(args.seconds), "--seeds", str(args.seeds)]
    with tempfile.TemporaryDirectory() as cache:  # each seed's programs are those of the first
        environ = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        together = job([__file__, *own], WORKERS, environ=environ)
        with joined(2, args.rate) as hosts:
            apart = job([__file__, *own], WORKERS, hosts, environ=environ)
    report(
        "Synchronization strategies side by side",
        rows(together, "on one host", args.seconds) + rows(apart, f"on two, {args.rate}", args.seconds),
        args.write,
        [
            f"Digits, {args.seeds} seeds (an accuracy each), SGD at 0.05, {SIZE} examples of each of {WORKERS} "
            f"workers in an update; rounds have {LOCAL_STEPS} updates. Seconds are those of steps, compilation and "
            f"evaluation apart; strategies took turns in blocks of {BLOCK:g} s. {WORKERS} ranks share {os.cpu_count()} "
            "cores with both hosts' TCP. Ratios: median over seeds, and the least and most.",
        ],
    )


if __name__ == "__main__":
    main()
