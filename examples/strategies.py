"""Select a synchronization strategy by one word: train on digits with each strategy, with small batches.

    adaptive run -n 4 examples/strategies.py
    python examples/strategies.py --workers 4 --strategy model_averaging

The second line runs the workers in one process, each on a CPU device. By default all strategies run one after another,
for the same number of epochs each.
"""

import argparse
import os

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
if RANK is not None:  # pin each rank to a core before JAX starts its threads; ranks share cores if there are too few
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[int(RANK) % len(CORES)]})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from _data import load  # noqa: E402
from _models import ConvNet  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import collectives.strategies as sync  # noqa: E402
import controllers as ctrl  # noqa: E402

SGD = optax.sgd(0.1)
OUTER = optax.sgd(0.7, momentum=0.5, nesterov=True)
STRATEGIES = {
    "synchronous": sync.synchronous(SGD),
    "model_averaging": sync.model_averaging(SGD),
    "pair_averaging": sync.pair_averaging(SGD),
    "local_steps": sync.local_steps(SGD, steps=4),
    "diloco": sync.diloco(SGD, OUTER, steps=4),
    "hybrid": sync.hybrid(sync.model_averaging(SGD), sync.synchronous(SGD)),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", choices=[*STRATEGIES, "islands", "all"], default="all")
parser.add_argument("--workers", type=int, default=4, help="in one process; under mpirun every rank is a worker")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--local-batch", type=int, default=16, help="examples per worker and step; a round has four times")
args = parser.parse_args()
if RANK is None:
    jax.config.update("jax_num_cpu_devices", args.workers)

train, test, classes, _ = load("digits")
net = ConvNet(classes)
params = net.init(jax.random.key(0), train["image"][:1])


def loss_fn(params, batch):
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def when_it_learns(control, loss):
    """Switch the hybrid strategy to synchronous steps once the loss is below 0.5."""
    if loss < 0.5:
        control.set_hyperparameters(synchronous=True)


def driver_of(strategy):
    def driver(state, batch):
        state, loss = strategy.step(state, jax.value_and_grad(loss_fn), batch)
        loss = comm.all_reduce(loss)
        if strategy.name == "hybrid":
            ctrl.hook(when_it_learns, loss)
        return state, {"loss": loss}

    return driver


def accuracy_of(strategy):
    def accuracy(state, batch):
        return jnp.mean(net.apply(strategy.model(state), batch["image"]).argmax(-1) == batch["label"])

    return accuracy


with comm.world() as world:
    pairs = [range(first, min(first + 2, world.size)) for first in range(0, world.size, 2)]  # or comm.by_host(world)
    STRATEGIES["islands"] = sync.islands(SGD, OUTER, 4, pairs)
    show = print if world.rank == 0 else lambda *_: None
    show(f"{'':<18} {'accuracy':>9} {'steps':>7} {'messages':>9}   per step, on {world.size} workers")
    for name, strategy in STRATEGIES.items():
        if args.strategy not in (name, "all"):
            continue
        batch = world.size * args.local_batch * (4 if name in ("local_steps", "diloco") else 1)
        program = ad.Program(
            driver_of(strategy),
            strategy.init(params),
            train,
            global_batch=batch,
            per_worker_state=strategy.per_worker_state,
            world=world,
            resizable=False,
        )
        *_, report = program.run(epochs=args.epochs)
        accuracy = program.evaluate(accuracy_of(strategy), test)
        show(f"{name:<18} {accuracy:>9.1%} {program.steps:>7} {report.messages:>9}")
