"""Federated averaging among clients of unequal speed and different data, with equal and with balanced local batches.

    adaptive run -n 4 examples/federated.py
    python examples/federated.py --clients 4

The second line runs the clients in one process, each on a CPU device. Each client has its own digits, with its own
share of each class. In a round, each client takes a few steps of SGD; then the models are averaged, weighted by
examples. To simulate a device that is k times slower, a client computes every gradient k times. Two programs alternate:
one has equal local batches, where all clients wait for the slowest; the other balances them (LB-BSP), so that all
clients finish a round at the same time.
"""

import argparse
import os

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
if RANK is not None:  # pin each rank to a core before JAX starts its threads; ranks share cores if there are too few
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[int(RANK) % len(CORES)]})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from _data import load  # noqa: E402
from _models import ConvNet  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
import monitors as mon  # noqa: E402

SLOWNESS = (1, 3, 2, 4)  # of client 0, 1, …

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--clients", type=int, default=4, help="in one process; under mpirun every rank is a client")
parser.add_argument("--rounds", type=int, default=120, help="of each program")
parser.add_argument("--block", type=int, default=10, help="rounds until it is the other program's turn")
parser.add_argument("--local-steps", type=int, default=4, help="of SGD, by each client in a round")
parser.add_argument("--local-batch", type=int, default=64, help="examples per client and round, on average")
parser.add_argument("--alpha", type=float, default=0.5, help="the smaller, the less alike are the clients' data")
args = parser.parse_args()
if RANK is None:
    jax.config.update("jax_num_cpu_devices", args.clients)

train, test, classes, _ = load("digits")
net = ConvNet(classes)
params = net.init(jax.random.key(0), train["image"][:1])


def label_skew(labels, clients, alpha):
    """Return each client's examples: its share of every class is drawn from Dirichlet(alpha), as in Hsu et al. 2019."""
    rng = np.random.default_rng(0)  # the same on every rank
    parts = []
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(examples)
        parts.append(np.split(examples, ends[:-1].astype(int)))
    return [np.concatenate(of_client) for of_client in zip(*parts, strict=True)]


def loss_fn(params, batch):
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def gradient(params, minibatch, times):
    """Return the gradient, computed `times` times, which simulates a slow client."""

    def compute(_, found):
        same = jax.tree.map(lambda p, g: p - 1e-30 * g, params, found)  # otherwise XLA would compute it once
        return jax.grad(loss_fn)(same, minibatch)

    return jax.lax.fori_loop(0, times, compute, jax.tree.map(jnp.zeros_like, params))


def equal(params, batch):
    slowness = jnp.asarray(np.resize(SLOWNESS, ad.capacity()))[ad.worker_index()]

    def local_step(params, minibatch):
        grads = gradient(params, minibatch, slowness)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

    local, _ = jax.lax.scan(local_step, params, ad.minibatches(batch, args.local_steps))
    return comm.all_reduce(local), {"loss": comm.all_reduce(loss_fn(local, batch))}


def balanced(params, batch):
    ctrl.hook(ctrl.balance(dead_band=0.05), comm.all_gather(mon.compute_seconds()), every=5)
    return equal(params, batch)


def accuracy(params, batch):
    return jnp.mean(net.apply(params, batch["image"]).argmax(-1) == batch["label"])


def sizes(numbers):
    return " + ".join(map(str, numbers))


with comm.world() as world:
    show = print if world.rank == 0 else lambda *_: None
    shards = ad.Shards(
        jax.tree.map(lambda a, own=own: a[own], train) for own in label_skew(train["label"], world.capacity, args.alpha)
    )
    programs = {
        name: ad.Program(driver, params, shards, global_batch=world.size * args.local_batch, world=world)
        for name, driver in (("equal", equal), ("LB-BSP", balanced))
    }
    show(programs["LB-BSP"].explain())
    slower = sizes(np.resize(SLOWNESS, world.capacity)).replace(" + ", ", ")
    show(f"\n{world.size} clients, slower by {slower}; {shards}\n")
    show(f"{'':>6} {'equal local batches':^19} {'LB-BSP':^19}")
    show(f"{'round':>6} {'s/round':>9} {'accuracy':>9} {'s/round':>9} {'accuracy':>9}   local batches")

    seconds, enough = {name: [] for name in programs}, {}
    for first in range(0, args.rounds, args.block):
        row = f"{min(first + args.block, args.rounds):>6}"
        for name, program in programs.items():
            block = [report.seconds for report in program.run(steps=min(args.block, args.rounds - first))]
            seconds[name] += block
            correct = program.evaluate(accuracy, test)
            if correct >= 0.9:
                enough.setdefault(name, sum(seconds[name]))
            row += f" {np.median(block):>9.4f} {correct:>9.2%}"
        show(f"{row}   {sizes(programs['LB-BSP'].batch_sizes)}")

    settled = {name: np.median(times[-len(times) // 3 :]) for name, times in seconds.items()}
    show(f"\na round        {settled['equal'] / settled['LB-BSP']:.2f} times as fast with LB-BSP's local batches")
    for name, when in enough.items():
        show(f"90 % accuracy  after {when:.1f} s with {name} local batches")
    for program in programs.values():
        program.close()
