"""KungFu's figure 2: a batch that follows the noise scale, compared with the best static batch.

    PJRT_NPROC=1 mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/kungfu_figure_2.py

Fashion-MNIST, a small conv net, and SGD with momentum at a constant learning rate of 0.1 for all, as in the workshop
paper, which trains ResNet-32 on CIFAR-10. Compared are static batches and one that grows with the noise scale from the
smallest towards the largest. Reported are the time and the examples to several accuracies, and how steady the accuracy
is at the end. Seconds are those of training steps, without evaluation and compilation at the start. The runs of one
seed alternate every quarter of an epoch.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _examples import SmallConvNet, load
from _measure import command_line, middle, pin, report, table
from _timed_models import cross_entropy
from _training import driver_of

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

parser = command_line(__doc__)
parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--static", type=int, nargs="+", default=[128, 256, 512, 4096], help="static global batches")
parser.add_argument("--learning-rate", type=float, default=0.1)
parser.add_argument("--targets", type=float, nargs="+", default=[0.85, 0.87, 0.88, 0.885, 0.89])
args = parser.parse_args()

PARTS = 4  # evaluations per epoch
SMALL, LARGE = min(args.static), max(args.static)
ADAPTIVE = f"adaptive, {SMALL} to at most {LARGE}"


train, test, classes, data_name = load(args.data)
NET = SmallConvNet(classes)
OPTIMIZER = optax.sgd(args.learning_rate, momentum=0.9)


def accuracy(state, batch):
    """Return the share of correct predictions."""
    return jnp.mean(NET.apply(state[0], batch["image"]).argmax(-1) == batch["label"])


def driver_with(policy):
    """Return the training step, with a policy for the global batch or none."""

    def adapting(grads, avg_grads):
        ctrl.hook(policy, mon.noise_scale(grads, avg_grads), every=20)
        return {}

    return driver_of(cross_entropy(NET.apply), OPTIMIZER, *([adapting] if policy else []))


def ways():
    """Return the compared ways by name: the first batch, and the policy for the following ones."""
    static = {f"static {batch}": (batch, None) for batch in args.static}
    return static | {ADAPTIVE: (SMALL, ctrl.noise_batch(min_batch=SMALL, max_batch=LARGE, monotone=True))}


def train_all(world, seed):
    """Train in each way, and return (seconds, examples, accuracy, batch) after every quarter of an epoch."""
    params = NET.init(jax.random.key(seed), train["image"][:1])
    programs, courses = {}, {}
    for name, (batch, policy) in ways().items():
        state = (params, OPTIMIZER.init(params))
        programs[name] = ad.Program(driver_with(policy), state, train, global_batch=batch, world=world, seed=seed)
        programs[name].warm_up()
        courses[name] = [(0.0, 0, float(programs[name].evaluate(accuracy, test)), batch)]
    for part in range(1, args.epochs * PARTS + 1):
        until = part * len(train["label"]) / PARTS
        for name, program in programs.items():
            seconds, examples, _, batch = courses[name][-1]
            while examples < until:
                step = program.step()
                seconds, examples, batch = seconds + step.seconds, step.examples, step.global_batch
            courses[name].append((seconds, examples, float(program.evaluate(accuracy, test)), batch))
        if world.rank == 0 and part % PARTS == 0:
            now = ", ".join(f"{name}: {c[-1][2]:.3f} ({c[-1][3]}) {c[-1][0]:.0f} s" for name, c in courses.items())
            print(f"seed {seed}, epoch {part // PARTS}: {now}", flush=True)
    for program in programs.values():
        program.close()
    return courses


def reached(course, target):
    """Return seconds and examples until the accuracy is at least `target`.

    The accuracy is the median of three consecutive evaluations, so that one lucky evaluation does not count; the last
    of the three gives the time.
    """
    seconds, examples, accuracies, _ = np.array(course).T
    steady = np.median([accuracies[:-2], accuracies[1:-1], accuracies[2:]], axis=0)
    hits = np.flatnonzero(steady >= target)
    return (seconds[hits[0] + 2], examples[hits[0] + 2]) if len(hits) else (np.inf, np.inf)


def tables(seeds):
    """Return rows of time by way, of examples by way, and of adaptive against the best static batch by target."""
    names = list(seeds[0])
    hits = {n: {t: np.array([reached(c[n], t) for c in seeds]) for t in args.targets} for n in names}
    time, examples, against = [], [], []
    for name in names:
        last = [np.array(c[name]) for c in seeds]
        quarter = len(last[0]) // 4
        time.append(
            {"": name}
            | {f"s to {t:.1%}": middle(hits[name][t][:, 0], 1) for t in args.targets}
            | {"s per epoch, last quarter": middle([PARTS * np.diff(c[-quarter:, 0]).mean() for c in last])}
        )
        examples.append(
            {"": name}
            | {f"epochs to {t:.1%}": middle(hits[name][t][:, 1] / len(train["label"])) for t in args.targets}
            | {"accuracy, last quarter": middle([c[-quarter:, 2].mean() for c in last], 4)}
            | {"its standard deviation": middle([c[-quarter:, 2].std() for c in last], 4)}
        )
    for target in args.targets:
        best = min(names[:-1], key=lambda name: np.median(hits[name][target][:, 0]))
        pair = {"the best static, in hindsight": best, "the smallest": names[0], "the largest": names[-2]}
        row = {"accuracy": f"{target:.1%}", "best static": best}
        for title, other in pair.items():
            ours, theirs = (hits[name][target][:, 0] for name in (ADAPTIVE, other))
            ratios = ours / theirs if np.isfinite([ours, theirs]).all() else [np.nan]
            row[f"adaptive's time / {title}"] = middle(ratios)
        against.append(row)
    return time, examples, against


def main():
    """Measure and report."""
    with comm.world() as world:
        if world.processes > 1:
            cores = sorted(os.sched_getaffinity(0))
            pin(cores[world.rank % len(cores)])
        seeds = [train_all(world, seed) for seed in range(args.seeds)]
        if world.rank:
            return
        notes = [
            f"{data_name}, {args.epochs} epochs, {len(seeds)} seeds: median (least – most). SGD, momentum 0.9, "
            f"learning rate {args.learning_rate} fixed for all. {world.size} workers, one core and one thread each.",
            "An accuracy counts as reached with the median of three evaluations in a row; there are four per epoch.",
        ]
        time, examples, against = tables(seeds)
        paragraphs = [table(examples), "Time against static batches:", table(against), *notes]
        report("A batch that follows the noise scale against static ones", time, args.write, paragraphs)


if __name__ == "__main__":
    main()
