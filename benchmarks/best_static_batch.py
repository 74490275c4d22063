"""A batch that a policy sets, against the best static batch of a grid, which is known only afterwards.

    python benchmarks/best_static_batch.py               # trains for 8 minutes at most; repeat until it is complete
    python benchmarks/best_static_batch.py --time        # seconds of a step on this machine, 1 minute
    python benchmarks/best_static_batch.py --write       # tables and picture

Three tasks are trained to a test loss: Fashion-MNIST (a small conv net, SGD with momentum, as in KungFu's experiment),
digits (a perceptron, Adam) and text (a transformer of one block, Adam). Learning rates are constant. On a seed of its
own, each static batch gets its best learning rate, of powers of two, and so does each policy: `goodput_batch` with a
learning rate that follows the batch and with a fixed one, and `noise_batch` with a fixed one. They start from the batch
of which half a step's seconds are fixed. The policy that is the best on that seed is the one that counts. Then all run
with three other seeds. A loss is reached when the median of three evaluations in a row is at most the target.

Static batches run in plain jitted loops, policies through the library. Both train here on one core, but time to a
target is computed: the steps of each batch times the seconds of such a step

* on one core: as measured here, a plain loop's for static batches and the program's with its monitor for policies;
* on eight GPUs, a model: 5.896 ms + 0.5931 ms an example, the line through the two times that LBB measured on a Tesla
  M40 (J. Supercomputing 2024, table 2), and 1.28 ms for the sum of 1 MiB between two ranks (`sums_between_gpus.py`).

`goodput_batch` is given the seconds of these models. (Aimed at: at least 15 % less time than the best static batch on
two of three tasks, and never more than 3 % more. In the model of eight GPUs the former is so on Fashion-MNIST, and
neither on digits.)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _measure import RESULTS, alternate, report, table
from _static_batch_tasks import TASKS, Adaptive, Machine, Mark, PlainLoop, Task, adaptive, fixed, program_of, task

import controllers as ctrl

FOUND = RESULTS / "best_static_batch.json"
TUNED, SEEDS = 100, (0, 1, 2)  # the seed of the learning rates, and those that count
GPUS = Machine("eight GPUs", 8, 5.896e-3, 0.5931e-3, 1.28e-3)
POLICIES = {  # and whether the learning rate follows the batch
    "goodput_batch, scaled": (ctrl.goodput_batch, True),
    "goodput_batch": (ctrl.goodput_batch, False),
    "noise_batch": (ctrl.noise_batch, False),
}
Seconds = Callable[[int], float]  # of a step of a batch


class OverError(Exception):
    """The seconds of this call are over; the next call goes on."""


class Store:
    """Runs by key, in a file."""

    def __init__(self, minutes: float):
        self.runs: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
        self._until = time.monotonic() + 60 * minutes

    def run(self, key: str, done: Callable[[list[Mark]], bool], marks: Callable[[], Iterator[Mark]]) -> list[Mark]:
        """Return the marks of a run until it is `done`: from the file, or trained now."""
        if key not in self.runs:
            if time.monotonic() > self._until:
                raise OverError
            began, course = time.monotonic(), list[Mark]()
            for mark in marks():
                course.append(mark)
                if not np.isfinite(mark[1]) or done(course):
                    break
            self.put(key, course)
            examples, loss, spans = course[-1]
            took = time.monotonic() - began
            print(f"{key}: loss {loss:.4f} at {examples}, batch {spans[-1][0]}, {took:.1f} s", flush=True)
        return self.runs[key]

    def put(self, key: str, value: Any) -> None:
        """Write a value to the file."""
        self.runs[key] = value
        FOUND.write_text(json.dumps(self.runs, separators=(",", ":")))


def hit(course: list[Mark], target: float) -> int | None:
    """Return the index of the mark at which the median of three losses is at most the target; None: never."""
    losses = [mark[1] for mark in course]
    hits = (k for k in range(2, len(losses)) if np.median(losses[k - 2 : k + 1]) <= target)
    return next(hits, None)


def total(course: list[Mark], until: int | None, seconds: Seconds) -> float:
    """Return the sum of `seconds(batch)` over the steps up to a mark; infinite if that is None."""
    if until is None:
        return float("inf")
    return float(sum(steps * seconds(batch) for mark in course[: until + 1] for batch, steps in mark[2]))


class Way(NamedTuple):
    """A static batch, or a policy on a machine."""

    name: str
    lr: float  # the best on the seed of the learning rates
    cost: float  # on that seed
    courses: list[list[Mark]]  # of the seeds that count

    def totals(self, target: float, seconds: Seconds) -> np.ndarray:
        """Return the totals of `seconds(batch)` until the target; shape=(seeds,)."""
        return np.array([total(course, hit(course, target), seconds) for course in self.courses])


def tuned(
    store: Store, t: Task, name: str, first: float, seconds: Seconds, marks: Callable[[float, int], Iterator[Mark]]
) -> Way:
    """Train with learning rates that are powers of two from `first`, then the seeds that count with the best of them.

    A run of the search ends when it costs more than the best so far.
    """
    costs = dict[int, float]()

    def reached(course: list[Mark]) -> bool:
        return hit(course, t.target) is not None

    def cost_of(k: int) -> float:
        if k not in costs:
            lr, least = first * 2.0**k, min(costs.values(), default=float("inf"))
            course = store.run(
                f"{t.name}/{name}/{lr:g}/{TUNED}",
                lambda course: reached(course) or total(course, len(course) - 1, seconds) > least,
                lambda: marks(lr, TUNED),
            )
            costs[k] = total(course, hit(course, t.target), seconds)
        return costs[k]

    cost_of(0)
    for way in (1, -1):
        k = way
        while abs(k) <= 6 and cost_of(k) <= cost_of(k - way) and (cost_of(k) < float("inf") or way == -1):
            k += way
        if cost_of(way) < cost_of(0):
            break
    best = min(costs, key=lambda k: (costs[k], abs(k)))
    lr = first * 2.0**best
    courses = [store.run(f"{t.name}/{name}/{lr:g}/{s}", reached, lambda s=s: marks(lr, s)) for s in SEEDS]
    return Way(name, lr, costs[best], courses)


def static_ways(store: Store, t: Task) -> list[Way]:
    """Train with each static batch."""
    ways, lr = list[Way](), t.lr
    for batch in t.batches:
        ways.append(tuned(store, t, f"static {batch}", lr, float, lambda lr, s, b=batch: fixed(t, b, lr, s)))
        lr = ways[-1].lr
    return ways


def policy_ways(store: Store, t: Task, machine: Machine, statics: list[Way]) -> list[Way]:
    """Train with each policy, from the batch of which half a step's seconds are fixed."""
    first, ways = machine.first_of(t.batches), list[Way]()
    lr = statics[t.batches.index(first)].lr  # where the search begins
    for name, (make, scaled) in POLICIES.items():
        policy = make(min_batch=t.batches[0], max_batch=t.batches[-1], multiple=t.batches[0])
        way = Adaptive(policy, machine, first, scaled)
        run = lambda lr, s, way=way: adaptive(t, way, lr, s)  # noqa: E731
        try:
            ways.append(tuned(store, t, f"{name}, {machine.name}", lr, machine.seconds, run))
        except OverError:
            print(f"Not complete: {t.name}, {name}. Run it again.")
    if not ways:
        raise OverError
    return ways


def measure_steps(store: Store, t: Task) -> None:
    """Measure the seconds of steps here: of a plain loop, and of a program with a policy that keeps its batch."""
    batches = t.batches[::2]
    calls: dict[str, Callable[[], Any]] = {}
    programs = []
    for batch in batches:
        keeps = ctrl.goodput_batch(min_batch=batch, max_batch=batch)
        programs.append(program_of(t, Adaptive(keeps, GPUS, batch, False), t.lr, 0))
        calls[f"plain {batch}"] = PlainLoop(t, batch, t.lr, 0).step
        calls[f"program {batch}"] = programs[-1].step
    samples = alternate(calls, rounds=40, warmup=4, clock=time.process_time)  # others use the cores, too
    store.put(f"{t.name}/seconds", {name: float(np.median(sample)) for name, sample in samples.items()})
    for program in programs:
        program.close()


def lines(store: Store, t: Task) -> dict[str, Machine]:
    """Return the measured seconds as lines over the batch, for "plain" and "program"; nothing if not measured."""
    found = {}
    for kind in ("plain", "program") if f"{t.name}/seconds" in store.runs else ():
        points = {
            int(name.split()[1]): seconds
            for name, seconds in store.runs[f"{t.name}/seconds"].items()
            if name.startswith(kind)
        }
        batches, seconds = np.array(list(points)), np.array(list(points.values()))
        each, fixed_cost = np.polyfit(batches, seconds, 1, w=1 / seconds)
        found[kind] = Machine("one core", 1, max(float(fixed_cost), 0.0), float(each), 0.0)
    return found


def middle(values: np.ndarray, form: str) -> str:
    """Return the median and the range over seeds."""
    return " – ".join(form.format(v) for v in (values.min(), values.max())).join(
        (form.format(np.median(values)) + " (", ")")
    )


def rows_of(store: Store, t: Task, statics: list[Way], policies: dict[str, list[Way]]) -> tuple[list, list]:
    """Return the rows of the claim, one per machine, and those of all ways."""
    claims, details = [], []
    core = lines(store, t)  # empty if steps were not measured
    for machine, ways in policies.items():
        of_static = GPUS.seconds if machine == GPUS.name else core["plain"].seconds
        of_policy = GPUS.seconds if machine == GPUS.name else core["program"].seconds
        best = min(statics, key=lambda way: np.median(way.totals(t.target, of_static)))
        ours = min(ways, key=lambda way: way.cost)
        theirs = best.totals(t.target, of_static)
        claims.append(
            {
                "": f"{t.name}, {machine}",
                "best static": best.name.split()[1],
                "policy": ours.name.rpartition(", ")[0],
                "its time / the best static's": middle(ours.totals(t.target, of_policy) / theirs, "{:.2f}"),
                "its examples / the best static's": middle(
                    ours.totals(t.target, float) / best.totals(t.target, float), "{:.2f}"
                ),
                "static at half / twice the batch": " / ".join(
                    f"{np.median(way.totals(t.target, of_static) / theirs):.2f}"
                    for way in statics
                    if int(way.name.split()[1]) * 2 in (b := int(best.name.split()[1]), 4 * b)
                ),
            }
        )
    for way in [*statics, *(way for ways in policies.values() for way in ways)]:
        static = way.name.startswith("static")
        row = {"": f"{t.name}, {way.name}", "learning rate": f"{way.lr:g}"}
        row["examples"] = middle(way.totals(t.target, float), "{:,.0f}")
        row["steps"] = middle(way.totals(t.target, lambda batch: 1.0), "{:,.0f}")
        row["s on eight GPUs (model)"] = middle(way.totals(t.target, GPUS.seconds), "{:.2f}")
        if core:
            on_core = core["plain" if static else "program"].seconds
            row["s on one core"] = middle(way.totals(t.target, on_core), "{:.2f}")
        details.append(row)
    return claims, details


def draw(found: dict[str, tuple[list[Way], dict[str, list[Way]]]], path: Path) -> None:
    """Draw the seconds to the target over the static batch, with the policies as lines; a panel per task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(4.6 * len(found), 7), squeeze=False)
    for column, (name, (statics, policies)) in enumerate(found.items()):
        t = task(name)
        top, bottom = axes[:, column]
        batches = [int(way.name.split()[1]) for way in statics]
        times = np.array([way.totals(t.target, GPUS.seconds) for way in statics])
        medians = np.median(times, axis=1)
        times[np.isinf(times)] = np.nan  # never reached
        top.plot(batches, np.where(np.isinf(medians), np.nan, medians), "C0-", label="static")
        top.plot(batches, times, "C0.")
        for k, way in enumerate(policies[GPUS.name], 1):
            label = way.name.rpartition(", ")[0]
            seconds = way.totals(t.target, GPUS.seconds)
            top.axhline(np.median(seconds), color=f"C{k}", label=label)
            top.axhspan(seconds.min(), seconds.max(), color=f"C{k}", alpha=0.15)
            for seed, course in enumerate(way.courses):
                x = np.cumsum([steps * batch for mark in course for batch, steps in mark[2]])
                y = [batch for mark in course for batch, _ in mark[2]]
                bottom.step(x, y, where="pre", color=f"C{k}", alpha=0.7, label=None if seed else label)
        top.set(title=f"{name}, {GPUS.name} (model)", xlabel="static batch", ylabel="s to the target", xscale="log")
        top.set_ylim(bottom=0)
        top.set_xticks(batches, [str(batch) for batch in batches])
        bottom.set(xlabel="examples", ylabel="global batch", yscale="log")
        bottom.set_yticks(batches, [str(batch) for batch in batches])
        bottom.xaxis.set_major_locator(plt.MaxNLocator(5))
        for ax in (top, bottom):
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Train, measure or report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="no run starts later")
    parser.add_argument("--only", default="", help="tasks whose names contain this")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    store = Store(0 if args.write else args.minutes)
    tasks = [name for name in TASKS if args.only in name]
    if args.time:
        for name in tasks:
            measure_steps(store, task(name))
            print(name, store.runs[f"{name}/seconds"])
        return
    found: dict[str, tuple[list[Way], dict[str, list[Way]]]] = {}
    try:
        for name in sorted(tasks, key=lambda name: name != "digits"):  # the shortest first
            statics = static_ways(store, task(name))
            found[name] = statics, {GPUS.name: policy_ways(store, task(name), GPUS, statics)}
        for name, (statics, policies) in found.items():
            for core in list(lines(store, task(name)).values())[1:]:
                policies[core.name] = policy_ways(store, task(name), core, statics)
    except OverError:
        print("Not complete: run it again.")
    claims, details = [], []
    for name, (statics, policies) in found.items():
        more_claims, more_details = rows_of(store, task(name), statics, policies)
        claims, details = claims + more_claims, details + more_details
    if not claims:
        return
    if args.write:
        draw(found, FOUND.with_suffix(".png"))
    measured = "; ".join(
        f"{name} {1e3 * line.fixed:.2g} ms + {1e6 * line.each:.3g} µs an example ({kind})"
        for name in found
        for kind, line in lines(store, task(name)).items()
    )
    notes = [
        "All ways, to the target:",
        table(details),
        "Medians of three seeds (least – most). The best static batch is the one with the least median, known only "
        "afterwards. Learning rates are constant: for each way the best power of two on a fourth seed. Test losses to "
        "reach: " + ", ".join(f"{name} {task(name).target}" for name in found) + ". Seconds on eight GPUs are of a "
        "model. "
        + (f"Those on one core are measured per step: {measured}." if measured else "One core: not measured."),
    ]
    report(
        "A policy's batch against the best static batch", claims, "best_static_batch.md" if args.write else None, notes
    )


if __name__ == "__main__":
    main()
