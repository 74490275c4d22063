"""With a worker five times slower than the others, asynchronous pairs make three times the updates (aimed at).

    PJRT_NPROC=1 OMPI_MCA_mpi_yield_when_idle=1 \
        mpirun --oversubscribe --bind-to none -n 4 python -m mpi4py benchmarks/asynchronous_pair_averaging.py

Control groups limit three ranks to 0.4 of a core and the fourth to 0.1, as in containers; this needs root. (A busy
process beside a rank would hardly slow it: the system gives the core to a rank that has slept as soon as it wakes.) A
net of dense layers is trained on digits with SGD. Compared are

    S-SGD    the same number of examples on each worker; gradients are averaged in each step, at the slowest's pace
    pairs    rounds of local steps, five times as many on the fast workers as on the slow one; in each round a worker
             averages its replica with another worker's current one; at the end of a round, all are averaged
    local    the same without pairs: replicas are averaged at the end of a round only

for the same seconds of steps, alternating in blocks. Accuracy is that of the averaged replicas on held-out digits.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Spread, limited, report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load

import adaptive as ad
import collectives as comm
import monitors as mon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seconds", type=float, default=15.0, help="of steps, of each program")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--slow-cores", type=float, default=0.1, help="of the slow worker; its caches are cold, too")
parser.add_argument("--size", type=int, default=80, help="examples in an update")
parser.add_argument("--learning-rate", type=float, default=0.05)
parser.add_argument("--local-steps", type=int, default=1, help="of the slow worker; the others take 5 times")
args = parser.parse_args()

SLOWER, BLOCK = 5, 3.0  # times; seconds
CORES = 0.4  # of a fast worker

train, test, classes, _ = load("digits")


class Net(nn.Module):
    """A net of dense layers of one width. (XLA computes convolutions inside a loop slowly on CPUs.)"""

    @nn.compact
    def __call__(self, image):
        x = image.reshape(len(image), -1)
        for _ in range(3):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(classes)(x)


NET = Net()


def loss_fn(params, batch):
    logits = NET.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - args.learning_rate * g, params, grads)


def seconds():
    return {"seconds": comm.all_gather(mon.compute_seconds())}


def synchronous(params, batch):
    grads = comm.all_reduce(jax.grad(loss_fn)(params, batch))
    return descend(params, grads), seconds()


def pairs(params, batch):
    def local_step(params, minibatch):
        grads = jax.grad(loss_fn)(params, minibatch)
        return descend(comm.asynchronous_mean(params), grads), None

    params, _ = jax.lax.scan(local_step, params, ad.minibatches(batch, size=args.size))
    return comm.all_reduce(params), seconds()


def local(params, batch):
    def local_step(params, minibatch):
        return descend(params, jax.grad(loss_fn)(params, minibatch)), None

    params, _ = jax.lax.scan(local_step, params, ad.minibatches(batch, size=args.size))
    return comm.all_reduce(params), seconds()


@jax.jit
def accuracy(params):
    return jnp.mean(NET.apply(params, test["image"]).argmax(-1) == test["label"])


class Done(NamedTuple):
    """The result of one run."""

    name: str
    updates: int  # of a fast worker in a step
    seconds: float
    steps: int
    slowness: list[float]
    curve: list[tuple[float, float]]


class Run:
    """A program, and its progress with one seed. Replicated on all ranks."""

    def __init__(self, world, program, name, shares):
        self.world, self.program, self.name, self.updates = world, program, name, shares[0]

    def begin(self, seed):
        """Start with other parameters, at another position of the data."""
        there = self.program.checkpoint()
        params = jax.tree.leaves(NET.init(jax.random.key(seed), train["image"][:1]))
        leaves, tree = jax.tree.flatten(there["state"])
        assert [a.shape for a in leaves] == [a.shape for a in params]
        self.program.restore({**there, "state": jax.tree.unflatten(tree, params)})
        self.seconds, self.steps, self.slowness, self.curve = 0.0, 0, [], []
        return self

    def done(self):
        """Return the result so far."""
        return Done(self.name, self.updates, self.seconds, self.steps, self.slowness, self.curve)

    def block(self, most):
        """Take steps for some seconds by rank 0's clock."""
        until = min(self.seconds + BLOCK, most)
        while self.seconds < until:
            for done in self.program.run(steps=2):
                self.seconds, self.steps = self.seconds + done.seconds, self.steps + 1
                per_update = np.asarray(done.metrics["seconds"]) / np.asarray(done.batch_sizes)
                if np.isfinite(per_update).all():
                    self.slowness.append(per_update[-1] / per_update[:-1].mean())
            self.seconds = float(self.world.all_gather_bytes(str(self.seconds).encode())[0])
        if self.world.rank == 0:
            self.curve.append((self.seconds, float(accuracy(self.program.state))))


def main():
    with comm.world() as world, ExitStack() as stack:
        fast, slow = SLOWER * args.local_steps, args.local_steps
        of_pairs, equal = (fast, fast, fast, slow), (1, 1, 1, 1)
        kinds = {"S-SGD": (synchronous, equal), "pairs": (pairs, of_pairs), "local": (local, of_pairs)}
        params, runs, found = NET.init(jax.random.key(0), train["image"][:1]), {}, []
        for name, (driver, shares) in kinds.items():
            options = {"global_batch": args.size * sum(shares), "shares": shares, "resizable": False, "world": world}
            program = ad.Program(driver, params, train, **options)
            program.warm_up()
            runs[name] = Run(world, program, name, shares)
        stack.enter_context(limited(args.slow_cores if world.rank == 3 else CORES))
        world.barrier()
        for seed in range(args.seeds):
            of_seed = [run.begin(seed) for run in runs.values()]
            for _ in range(round(args.seconds / BLOCK)):
                for run in of_seed:
                    run.block(args.seconds)
            found.append([run.done() for run in of_seed])
        if world.rank == 0:
            tell(found)


def tell(runs):
    columns = [list(column) for column in zip(*runs, strict=True)]
    rates = {c[0].name: np.array([r.updates * r.steps / r.seconds for r in c]) for c in columns}
    slow_rates = {c[0].name: np.mean([r.steps * (r.updates // SLOWER or 1) / r.seconds for r in c]) for c in columns}
    rows = []
    for column in columns:
        name = column[0].name
        ratio = rates[name] / rates["S-SGD"]
        thirds = [np.interp(args.seconds / 3, *zip(*r.curve, strict=True)) for r in column]
        rows.append(
            {
                "": name,
                "updates/s of a fast worker": f"{rates[name].mean():.1f}",
                "of the slow one": f"{slow_rates[name]:.1f}",
                "fast, to S-SGD's": f"{ratio.mean():.2f} ({ratio.min():.2f} – {ratio.max():.2f})",
                f"accuracy after {args.seconds / 3:.0f} s": " ".join(f"{a:.1%}" for a in thirds),
                f"after {args.seconds:.0f} s": " ".join(f"{r.curve[-1][1]:.1%}" for r in column),
                "slow worker is slower by": f"{np.median(np.concatenate([r.slowness for r in column])):.1f}",
            }
        )
    slices = Spread.of(np.concatenate([r.slowness for r in columns[1]]))
    report(
        "Asynchronous pair averaging beside a worker that is five times slower",
        rows,
        "asynchronous_pair_averaging.md",
        [
            f"Digits, {args.seeds} seeds (an accuracy each), SGD at {args.learning_rate}, {args.size} examples in an "
            f"update. Three ranks have {CORES} cores each, the fourth {args.slow_cores} (control groups). How much "
            "slower it is was measured in the runs, by its seconds of computing for an example over those of the "
            f"others (median; with pairs, 10th to 90th percentile of rounds: {slices.p10:.1f} – {slices.p90:.1f}). "
            "Seconds are those of steps, compilation and evaluation apart; the programs took turns in blocks of "
            f"{BLOCK:.0f} s. Ratios: mean over seeds, and the least and most.",
        ],
    )


if __name__ == "__main__":
    main()
