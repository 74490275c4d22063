"""Rounds in a few bits and islands, on two hosts that are joined at 100 Mbit/s.

    python benchmarks/thin_links.py accuracy rounds islands        # about 30 minutes
    python benchmarks/thin_links.py                                         # the tables once more

Four workers train a net of dense layers on digits, and a small transformer on text.

    accuracy    after 60 rounds of 8 local steps, three seeds, by format and by outer optimizer. It does not depend on
                the link: the workers are devices of one process.
    rounds      the bytes and seconds of a round's exchange, by format
    islands     bytes between hosts, and updates, of islands and of synchronous SGD, also with narrow wires

The last two are jobs of two ranks on each of two hosts (network namespaces of this machine: Linux and root). Bytes
are those of the hosts' interfaces.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from _hosts import job, joined
from _measure import RESULTS, report, table
from _thin_ranks import ALONE, ISLAND_ROUND, ISLANDS, ROUND, SYNCHRONOUS
from _thin_tasks import FLOAT32, FORMATS, OUTER, TASKS, Task

import collectives as comm
import collectives.strategies as sync
from collectives._codes import codec_of

WORKERS, HOSTS, ROUNDS = 4, 2, 60
FOUND = RESULTS / "thin_links.json"
Results = dict[str, Any]


# --- measuring --------------------------------------------------------------------------------------------------------


def accuracy_of(task: Task, world: Any, wire: Any, outer: str, seed: int) -> float:
    """Train 60 rounds, and return the model's accuracy on the test data, in percent."""
    strategy = sync.diloco(task.inner, OUTER[outer], ROUND, wire=wire)
    with task.program(world, strategy, ROUND, seed) as program:
        for _ in program.run(steps=ROUNDS):
            pass
        return 100 * float(jax.jit(task.accuracy)(strategy.model(program.state), task.test))


def measure_accuracy(task: str, seeds: int, outers: Sequence[str], formats: Sequence[str]) -> None:
    """Measure what has not been measured yet."""
    with comm.DeviceWorld(jax.devices()[:WORKERS]) as world:
        made = TASKS[task]()
        for outer in outers:
            for name in formats:
                for seed in range(seeds):
                    key = f"{task} | {name} | {outer} | {seed}"
                    if key not in known().get("accuracy", {}):
                        keep("accuracy", key, accuracy_of(made, world, FORMATS[name].wire, outer, seed))


def measure_link(part: str, task: str, times: int, rate: str) -> None:
    """Run a job on two hosts, once more if it has been measured before."""
    with joined(HOSTS, rate) as hosts:
        load = os.getloadavg()[0]
        keep(part, task, job([str(RESULTS.parent / "_thin_ranks.py"), part, task, str(times)], WORKERS, hosts))
        keep("load before", f"{part}, {task}", load)


def known() -> Results:
    """Return all results so far."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def keep(part: str, key: str, result: Any) -> None:
    """Add a result to those on the disk."""
    found = known()
    found.setdefault(part, {})[key] = result
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    told = {name: medians(rows) for name, rows in result.items()} if isinstance(result, dict) else result
    print(part, key, told, flush=True)


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the medians of measurements: bytes, payload, seconds."""
    return [float(x) for x in np.median(rows, axis=0)]


# --- tables -----------------------------------------------------------------------------------------------------------


def verdict(holds: bool) -> str:
    """Return a table's word."""
    return "holds" if holds else "**missed**"


def of_seconds(part: str, task: str, holds: bool) -> str:
    """Return a verdict on seconds, unless other processes took the cores from those that were measured."""
    load = known().get("load before", {}).get(f"{part}, {task}")
    return verdict(holds) if load is not None and load < WORKERS else "not settled: the machine was busy"


def by_outer(found: Mapping[str, float], task: str) -> list[dict[str, str]]:
    """Return the accuracies of a task, by format and outer optimizer."""
    rows = []
    for name in FORMATS:
        row = {"": f"{task}, {name}"}
        for outer in OUTER:
            seeds = of_seeds(found, task, name, outer)
            row[outer] = f"{np.mean(seeds):.2f} ({', '.join(f'{x:.1f}' for x in seeds)})" if seeds else "–"
        rows.append(row)
    return rows


def of_seeds(found: Mapping[str, float], task: str, name: str, outer: str) -> list[float]:
    """Return the accuracies of all seeds, in percent."""
    return [value for key, value in found.items() if key.startswith(f"{task} | {name} | {outer} | ")]


def judged(found: Mapping[str, float], task: str) -> list[dict[str, str]]:
    """Return what formats lose, each with its outer optimizer, against the best of float32's."""
    reference = max(([*of_seeds(found, task, FLOAT32, outer)] for outer in OUTER), key=sum)
    rows = []
    for name, format in FORMATS.items():
        seeds = of_seeds(found, task, name, format.outer)
        if name != FLOAT32 and len(seeds) == len(reference) > 0:
            lost = np.array(reference) - seeds
            rows.append(
                {
                    "": f"{task}, {name}",
                    "outer optimizer": format.outer,
                    "accuracy": f"{np.mean(seeds):.2f} %",
                    "float32, best outer optimizer": f"{np.mean(reference):.2f} %",
                    "points lost, mean (least to most)": f"{lost.mean():.2f} ({lost.min():.2f} to {lost.max():.2f})",
                    "bar": f"{format.points:g}",
                    "verdict": verdict(lost.mean() <= format.points),
                }
            )
    return rows


def theory(name: str, parameters: int) -> float:
    """Return the bytes that a host must send in a round's exchange."""
    codec = codec_of(FORMATS[name].wire)
    nbytes = 4 * parameters if codec is None else -(-parameters // codec.block) * codec.row_bytes
    return nbytes * 2 * (HOSTS - 1) / HOSTS


def exchanges(found: Mapping[str, Any], task: str, parameters: int) -> list[dict[str, str]]:
    """Return bytes and seconds of a round's exchange: those of a round, without those of the local steps alone."""
    middle = {name: np.array(medians(rows)) for name, rows in found.items()}
    own = {name: costs - middle[ALONE] for name, costs in middle.items()}
    rows = []
    for name, (nbytes, payload, seconds) in own.items():
        format = FORMATS.get(name)
        if name == ALONE:
            continue
        row = {
            "": f"{task}, {name}",
            "bytes of a host": f"{nbytes:,.0f}",
            "to float32": f"{nbytes / own[FLOAT32][0]:.4f}",
        }
        if format is not None:
            row["payload to theory"] = f"{payload / theory(name, parameters):.3f}"
        row |= {"seconds": f"{seconds:.3f}", "to float32's": f"{seconds / own[FLOAT32][2]:.3f}"}
        if format is not None and name != FLOAT32:
            row |= {
                "bars": f"{format.nbytes:g}; {format.seconds:g}",
                "bytes": verdict(nbytes / own[FLOAT32][0] <= format.nbytes),
                "its seconds": of_seconds("rounds", task, seconds / own[FLOAT32][2] <= format.seconds),
            }
        rows.append(row)
    return rows


def updates(found: Mapping[str, Any], task: str) -> list[dict[str, str]]:
    """Return bytes and updates of islands and of synchronous SGD; updates are optimizer steps of a worker."""
    nbytes, _, seconds = medians(found[SYNCHRONOUS])
    rows = []
    for name, measurements in found.items():
        own_bytes, _, own_seconds = medians(measurements)
        ratio = seconds / own_seconds
        row = {
            "": f"{task}, {name}",
            "bytes of a host in an update": f"{own_bytes:,.0f}",
            "to synchronous": f"1 / {nbytes / own_bytes:.1f}",
            "updates/s": f"{1 / own_seconds:.1f}",
            "to synchronous's": f"{ratio:.1f}",
        }
        if name == ISLANDS:
            row |= {
                "bars": f"1 / {ISLAND_ROUND}; 7",
                "bytes": verdict(nbytes / own_bytes >= 0.95 * ISLAND_ROUND),
                "updates": of_seconds("islands", task, ratio >= 7),
            }
        rows.append(row)
    return rows


def draw() -> None:
    """Write the tables of all results on the disk."""
    found = known()
    accuracy = found.get("accuracy", {})
    tasks = [task for task in TASKS if any(key.startswith(f"{task} |") for key in accuracy)]
    sizes = {task: TASKS[task]().parameters for task in found["rounds"]}
    rows = [row for task, own in found["rounds"].items() for row in exchanges(own, task, sizes[task])]
    tables = {
        "Accuracy": [row for task in tasks for row in judged(accuracy, task)],
        "Accuracy by outer optimizer, in percent": [row for task in tasks for row in by_outer(accuracy, task)],
        "Islands and synchronous SGD": [
            row for task, own in found.get("islands", {}).items() for row in updates(own, task)
        ],
    }
    notes = [EXPLAINED["Exchange"]]
    for title, own in tables.items():
        notes += [f"## {title}", table(own), EXPLAINED[title]] if own else []
    missing = [part for part in ("accuracy", "rounds", "islands") if part not in found]
    notes += [f"Not measured yet: {', '.join(missing)}."] if missing else []
    report("The exchange of a round in a few bits at 100 Mbit/s", rows, "thin_links.md", notes)


EXPLAINED = {
    "Exchange": "Two ranks on each of two hosts. Medians of rounds with an exchange, less those of local steps alone, "
    "in turn. Bytes are what the busier host puts on its interface, headers of Ethernet, IP and TCP included. "
    "*Payload* is without headers, relative to theory: each host sends the vector once, in its format. "
    "The rest, 2 kB, is probably MPI's. Seconds include encoding, decoding and the outer optimizer, for "
    "which four ranks have two cores. Formats have `hosts=comm.by_host(world)` unless the row says otherwise.",
    "Accuracy": f"`sync.diloco`, {ROUNDS} rounds of {ROUND} local steps of Adam, {WORKERS} workers; the same seeds and "
    "order of data for all. Each format, with the outer optimizer named there, is compared with float32 and the outer "
    "optimizer that is best for it, of those that were run. Of the digits, 360 are for testing: one is 0.28 points.",
    "Accuracy by outer optimizer, in percent": "Means, and each seed's accuracy; SGD with Nesterov's momentum.",
    "Islands and synchronous SGD": f"An update is a local step of each worker. Rounds of islands have {ISLAND_ROUND} "
    "updates. Narrow wires of synchronous SGD have error feedback and `hosts=`. Bytes include what ranks agree on in "
    "each step.",
}


def main() -> None:
    """Measure the parts that are named, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["accuracy", "rounds", "islands", []])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--outer", nargs="+", default=list(OUTER), choices=list(OUTER), help="of accuracy")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), help="of accuracy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--times", type=int, default=7, help="measurements of each program")
    parser.add_argument("--rate", default="100mbit", help="of the hosts' links, as tc reads it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:  # each seed's programs are those of the first
        if "accuracy" in args.parts:
            jax.config.update("jax_num_cpu_devices", WORKERS)
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for part in args.parts:
            for task in args.tasks:
                if part == "accuracy":
                    measure_accuracy(task, args.seeds, args.outer, args.formats)
                else:
                    measure_link(part, task, args.times, args.rate)
    draw()


if __name__ == "__main__":
    main()
