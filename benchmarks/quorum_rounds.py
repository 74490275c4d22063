"""With a worker five times slower than the others, rounds by quorum make four times S-SGD's updates (aimed at).

    PJRT_NPROC=1 OMPI_MCA_mpi_yield_when_idle=1 \\
        mpirun --oversubscribe --bind-to none -n 4 python -m mpi4py benchmarks/quorum_rounds.py

Each rank has a part of a core to itself, as in a container: three of them 0.4, the fourth a fifth of it at most. Needs
root, and control groups. Digits, a net of dense layers, SGD. Compared are, on equal batches,

    S-SGD        gradients are averaged in each step, at the pace of the slowest
    full rounds  `sync.diloco`: all take as many local steps, at the pace of the slowest
    quorum       `sync.quorum`: a round ends when three of four have taken theirs

for the same seconds of steps, in turn, block by block. Accuracy is that of `strategy.model` on held-out digits, whose
training set is repeated, so that a round fits into it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Spread, limited, report

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seconds", type=float, default=10.0, help="of steps, of each program")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--slow-cores", type=float, default=0.08, help="of the slow worker")
parser.add_argument("--local-steps", type=int, default=60, help="in a round")
parser.add_argument("--learning-rate", type=float, default=0.05)
args = parser.parse_args()

SIZE, CORES, BLOCK, SLOW = 48, 0.4, 5.0, 3  # examples in a local step; of a fast worker; seconds; a rank
COPIES = 9  # of the training set

TRAIN, TEST, CLASSES, _ = load("digits")
TRAIN = jax.tree.map(lambda a: np.concatenate([a] * COPIES), TRAIN)
SGD = optax.sgd(args.learning_rate)
OUTER = optax.sgd(0.7, momentum=0.5, nesterov=True)


class Net(nn.Module):
    """Layers of one width."""

    @nn.compact
    def __call__(self, image):
        x = image.reshape(len(image), -1)
        for _ in range(3):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(CLASSES)(x)


NET = Net()


def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits = NET.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def accuracy(params: Any) -> jax.Array:
    return jnp.mean(NET.apply(params, TEST["image"]).argmax(-1) == TEST["label"])


class Kind(NamedTuple):
    """A way to synchronize, and on how many examples."""

    strategy: sync.Strategy
    updates: int  # of a fast worker in a step of the program


KINDS = {
    "S-SGD": Kind(sync.synchronous(SGD), 1),
    "full rounds": Kind(sync.diloco(SGD, OUTER, args.local_steps), args.local_steps),
    "quorum": Kind(sync.quorum(SGD, OUTER, args.local_steps), args.local_steps),
}


class Run:
    """A program, and what it has done with a seed. The same on all ranks."""

    def __init__(self, world: Any, name: str, kind: Kind):
        self.world, self.name, self.kind, strategy = world, name, kind, kind.strategy

        def driver(state: Any, batch: Any) -> Any:
            new, loss = strategy.step(state, jax.value_and_grad(loss_fn), batch)
            measured = (mon.compute_seconds(), new.taken if name == "quorum" else 0)
            return new, {"loss": comm.all_reduce(loss), "measured": comm.all_gather(measured)}

        state = strategy.init(NET.init(jax.random.key(0), TRAIN["image"][:1]))
        options: dict[str, Any] = {"global_batch": SIZE * kind.updates * world.size, "resizable": False, "world": world}
        options["per_worker_state"] = strategy.per_worker_state
        self.program = ad.Program(driver, state, TRAIN, **options)
        self.program.warm_up()
        self.first = self.program.checkpoint()

    def begin(self, seed: int) -> Run:
        """Begin with other parameters, at another place of the data."""
        where = self.program.checkpoint()
        params = NET.init(jax.random.key(seed), TRAIN["image"][:1])
        state = self.first["state"]._replace(params=jax.tree.map(np.asarray, params))
        self.program.restore({**where, "state": state})
        self.seconds, self.steps, self.counted, self.taken = 0.0, 0, [], []
        self.slowness: list[float] = []
        self.curve: list[tuple[float, float, int]] = []
        return self

    def block(self) -> None:
        """Take some seconds of steps, as rank 0 counts them."""
        until = min(self.seconds + BLOCK, args.seconds)
        while self.seconds < until:
            for done in self.program.run(steps=1 if self.kind.updates > 1 else 4):
                self.seconds, self.steps = self.seconds + done.seconds, self.steps + 1
                seconds, left = (np.asarray(x) for x in done.metrics["measured"])
                if self.name == "full rounds" and np.isfinite(seconds).all():
                    self.slowness.append(float(seconds[SLOW] / np.delete(seconds, SLOW).mean()))
                if self.name == "quorum":
                    self.counted.append(int(self.program.state.counted))
                    self.taken.append(int(left[SLOW]))
            self.seconds = float(self.world.all_gather_bytes(str(self.seconds).encode())[0])
        if self.world.rank == 0:
            correct = float(accuracy(self.kind.strategy.model(self.program.state)))
            self.curve.append((self.seconds, correct, self.steps * self.kind.updates))

    def done(self) -> Done:
        """Return what it has done."""
        rate = self.kind.updates * self.steps / self.seconds
        return Done(self.name, rate, self.slowness, self.curve, self.counted, self.taken)


class Done(NamedTuple):
    """One run."""

    name: str
    rate: float  # updates of a fast worker in a second
    slowness: list[float]
    curve: list[tuple[float, float, int]]  # seconds, accuracy, updates of a fast worker
    counted: list[int]
    taken: list[int]  # local steps that the slow worker still has to itself, after each round


def main() -> None:
    with comm.world() as world, ExitStack() as stack:
        runs = [Run(world, name, kind) for name, kind in KINDS.items()]
        stack.enter_context(limited(args.slow_cores if world.rank == SLOW else CORES))
        world.barrier()
        found = []
        for seed in range(args.seeds):
            of_seed = [run.begin(seed) for run in runs]
            for _ in range(round(args.seconds / BLOCK)):
                for run in of_seed:
                    run.block()
            found.append([run.done() for run in of_seed])
        if world.rank == 0:
            tell(found)


def tell(found: list[list[Done]]) -> None:
    columns = {column[0].name: list(column) for column in zip(*found, strict=True)}
    rates = {name: np.array([done.rate for done in column]) for name, column in columns.items()}
    half, rows = args.seconds / 2, []
    alike = [np.array(done.curve)[-1, 2] for done in columns["full rounds"]]
    for name, column in columns.items():
        ratio = rates[name] / rates["S-SGD"]
        curves = [np.array(done.curve) for done in column]
        early = [np.interp(half, c[:, 0], c[:, 1]) for c in curves]
        later = [c[c[:, 2] >= n, 1] for n, c in zip(alike, curves, strict=True)]
        rows.append(
            {
                "": name,
                "updates/s of a fast worker": f"{rates[name].mean():.1f}",
                "to S-SGD's": f"{ratio.mean():.2f} ({ratio.min():.2f} – {ratio.max():.2f})",
                f"accuracy after {half:.0f} s": " ".join(f"{a:.1%}" for a in early),
                f"after {args.seconds:.0f} s": " ".join(f"{c[-1, 1]:.1%}" for c in curves),
                "after the updates of full rounds": " ".join(f"{a[0]:.1%}" if len(a) else "–" for a in later),
            }
        )
    slowness = Spread.of(np.concatenate([done.slowness for done in columns["full rounds"]]))
    counted = np.concatenate([done.counted for done in columns["quorum"]])
    shares = ", ".join(f"{n} in {np.mean(counted == n):.0%}" for n in sorted(set(counted.tolist())))
    steps = [t for done in columns["quorum"] for t in np.diff([0, *done.taken]) if t > 0]
    report(
        "Rounds by quorum beside a worker that is five times slower",
        rows,
        "quorum_rounds.md",
        [
            f"Digits, {args.seeds} seeds (an accuracy each), SGD at {args.learning_rate}, {SIZE} examples in an update,"
            f" {args.local_steps} local steps in a round. Three ranks have {CORES} cores each, the fourth "
            f"{args.slow_cores} (control groups). In full rounds it took {slowness.median:.1f} times the seconds of "
            f"the others (10th to 90th percentile of rounds: {slowness.p10:.1f} – {slowness.p90:.1f}). With the quorum "
            f"it took {np.mean(steps):.1f} local steps in a round that did not count it; workers counted: {shares} of "
            "the rounds. The last column is of the end of the first block with as many updates of a fast "
            "worker as full rounds made in all. Seconds are those of steps, compilation and evaluation apart; the "
            f"programs took turns in blocks of {BLOCK:.0f} s. Ratios: mean over seeds, and the least and most.",
        ],
    )


if __name__ == "__main__":
    main()
