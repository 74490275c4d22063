"""KungFu's figure 2, for real: a batch that follows the noise scale against the best static batch.

    PJRT_NPROC=1 mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/kungfu_figure_2.py

Fashion-MNIST, a small conv net, SGD with momentum at a fixed learning rate (as in the workshop paper, which trains
ResNet-32 on CIFAR-10): a small static batch, a large one, and one that grows from the small to the large with the
noise scale. Reported are time and examples to an accuracy that all of them reach, and how steady the accuracy is
after that. Seconds are those of training steps; evaluation and compilation at the start are not counted. The runs of
one seed take turns, epoch part by epoch part.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import RESULTS, pin, report

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load
from _models import ConvNet

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
parser.add_argument("--epochs", type=float, default=8)
parser.add_argument("--parts", type=int, default=4, help="evaluations per epoch")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--small", type=int, default=128)
parser.add_argument("--large", type=int, default=4096)
parser.add_argument("--learning-rate", type=float, default=0.05)
args = parser.parse_args()

train, test, classes, _ = load(args.data)
NET = ConvNet(classes)
OPTIMIZER = optax.sgd(args.learning_rate, momentum=0.9)


def loss_fn(params, batch):
    """Mean cross entropy."""
    logits = NET.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def accuracy(state, batch):
    """The share of right answers."""
    return jnp.mean(NET.apply(state[0], batch["image"]).argmax(-1) == batch["label"])


def driver_with(policy):
    """The training step, with a policy for the global batch or none."""

    def driver(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        metrics = {"loss": comm.all_reduce(loss)}
        if policy is not None:
            noise = mon.noise_scale(grads, avg_grads)
            ctrl.hook(policy, noise, every=20)
            metrics["noise"] = noise.scale
        updates, opt_state = OPTIMIZER.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    return driver


def ways():
    """The three, by name: first batch and policy."""
    grow = ctrl.noise_batch(min_batch=args.small, max_batch=args.large, monotone=True)
    return {
        f"static {args.small}": (args.small, None),
        f"static {args.large}": (args.large, None),
        f"adaptive {args.small} to {args.large}": (args.small, grow),
    }


def train_all(world, seed):
    """Accuracy by seconds and examples of each way, all of them taking turns."""
    params = NET.init(jax.random.key(seed), train["image"][:1])
    programs, curves = {}, {}
    for name, (batch, policy) in ways().items():
        state = (params, OPTIMIZER.init(params))
        programs[name] = ad.Program(driver_with(policy), state, train, global_batch=batch, world=world, seed=seed)
        programs[name].warm_up()
        curves[name] = [(0.0, 0, float(programs[name].evaluate(accuracy, test)), batch)]
    part = len(train["label"]) / args.parts
    for turn in range(1, int(args.epochs * args.parts) + 1):
        for name, program in programs.items():
            seconds, examples, last = curves[name][-1][0], curves[name][-1][1], None
            while examples < turn * part:
                last = program.step()
                seconds, examples = seconds + last.seconds, last.examples
            if last is not None:
                curves[name].append((seconds, examples, float(program.evaluate(accuracy, test)), last.global_batch))
        if world.rank == 0:
            now = ", ".join(f"{n}: {c[-1][2]:.3f} ({c[-1][3]}) {c[-1][0]:.0f} s" for n, c in curves.items())
            print(f"seed {seed}, epoch {turn / args.parts:.2f}: {now}", flush=True)
    for program in programs.values():
        program.close()
    return curves


def reached(curve, target):
    """Seconds and examples after which the accuracy is first at least `target`."""
    return next(((s, n) for s, n, a, _ in curve if a >= target), (np.nan, np.nan))


def table(seeds):
    """One row per way, medians over seeds; per seed the target is what the least good way reaches."""
    names = list(seeds[0])
    targets = [min(max(a for _, _, a, _ in curve) for curve in curves.values()) - 1e-9 for curves in seeds]
    rows = []
    best = min(names[:2], key=lambda n: np.median([reached(c[n], t)[0] for c, t in zip(seeds, targets, strict=True)]))
    for name in names:
        hits = np.array([reached(c[name], t) for c, t in zip(seeds, targets, strict=True)])
        ratio = [reached(c[name], t)[0] / reached(c[best], t)[0] for c, t in zip(seeds, targets, strict=True)]
        after = [np.std([a for s, _, a, _ in c[name] if s >= h[0]]) for c, h in zip(seeds, hits, strict=True)]
        rows.append(
            {
                "": name,
                "seconds to it": f"{np.median(hits[:, 0]):.1f} ({hits[:, 0].min():.1f} – {hits[:, 0].max():.1f})",
                "examples to it": f"{np.median(hits[:, 1]):,.0f}",
                "time / best static": f"{np.median(ratio):.2f} ({min(ratio):.2f} – {max(ratio):.2f})",
                "final accuracy": f"{np.median([c[name][-1][2] for c in seeds]):.3f}",
                "its spread after": f"{np.median(after):.4f}",
                "seconds for all": f"{np.median([c[name][-1][0] for c in seeds]):.1f}",
            }
        )
    return rows, targets, best


def draw(seeds, path):
    """Accuracy by time, one panel per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4 * len(seeds), 6)
    figure, axes = plt.subplots(2, len(seeds), figsize=size, sharex="col", squeeze=False, height_ratios=(2, 1))
    for column, curves in enumerate(seeds):
        for name, curve in curves.items():
            seconds, _, accuracies, batches = np.array(curve).T
            axes[0, column].plot(seconds, accuracies, marker=".", label=name)
            axes[1, column].step(seconds, batches, where="pre")
        axes[0, column].set_ylim(bottom=0.6)
        axes[0, column].set_title(f"seed {column}")
        axes[1, column].set_yscale("log", base=2)
        axes[1, column].set_xlabel("seconds of training steps")
    axes[0, 0].set_ylabel("test accuracy")
    axes[1, 0].set_ylabel("global batch")
    axes[0, 0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main():
    """Measure and report."""
    with comm.world() as world:
        if world.processes > 1:
            pin(sorted(os.sched_getaffinity(0))[world.rank % os.cpu_count()])
        seeds = [train_all(world, seed) for seed in range(args.seeds)]
        if world.rank:
            return
        rows, targets, best = table(seeds)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kungfu_figure_2.json").write_text(json.dumps(seeds))
        draw(seeds, RESULTS / "kungfu_figure_2.png")
        notes = [
            f"Target: the highest accuracy that all three reach, per seed {', '.join(f'{t:.3f}' for t in targets)}. "
            f"The best static batch is {best}.",
            f"{args.data}, {args.epochs:g} epochs, evaluated {args.parts} times each; SGD, momentum 0.9, learning rate "
            f"{args.learning_rate} fixed for all; {args.seeds} seeds, medians (least – most); {world.size} workers, "
            "one core and one thread each.",
        ]
        report("A batch that follows the noise scale against static ones", rows, "kungfu_figure_2.md", notes)


if __name__ == "__main__":
    main()
