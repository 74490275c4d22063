"""The examination of this process and of a test job, or of the job that this process is a rank of."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from collectives.worlds.mpi import MPIWorld
from launchers.mpirun import UsageError, clean, find

from .facts import JobFacts, facts
from .findings import (
    HealthCheck,
    clock_findings,
    folder_findings,
    job_findings,
    launcher_findings,
    link_findings,
    note,
    process_findings,
    wrong,
)
from .host_pairs import HostPair, host_pairs
from .measure import ExchangeTimes, Folder, LinkTimes, exchange, folder, links

TRIAL_RANKS = 2


@dataclass(frozen=True)
class Examination:
    """Result of an examination.

    Attributes:
      ranks: facts of each rank of the job; of this process if there is no job.
      findings: problems and notes, without those of `trial`.
      links: times between rank 0 and each other rank.
      pairs: bandwidth between each two hosts; empty for one host.
      exchange: times of an Allreduce; `None` for one rank.
      folder: the shared folder as the ranks see it; `None` if MPI could not be loaded.
      mpirun: kind and path of the launcher that `adaptive run` uses; "" if there is none, or in a job.
      trial: the examination of a test job of two ranks; `None` if none was started, or it failed.
    """

    ranks: tuple[JobFacts, ...]
    findings: tuple[HealthCheck, ...] = ()
    links: tuple[LinkTimes, ...] = ()
    pairs: tuple[HostPair, ...] = ()
    exchange: ExchangeTimes | None = None
    folder: Folder | None = None
    mpirun: str = ""
    trial: Examination | None = field(default=None)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.level == "wrong" for finding in self.all_findings)

    @property
    def all_findings(self) -> tuple[HealthCheck, ...]:
        """Findings of this examination and of the test job, without duplicates."""
        return tuple(dict.fromkeys([*self.findings, *(self.trial.all_findings if self.trial else ())]))


def examine_process(path: Path | None, trial: bool, seconds: float) -> Examination:
    """Examine this process, which was started without a launcher.

    Args:
      path: the folder that all hosts should share; by default the working directory.
      trial: whether to start a test job of two ranks.
      seconds: time limit of the test job.
    """
    own = replace(facts(), library=_library())
    found = list(process_findings(own))
    seen = folder(path or Path.cwd(), lambda text: [text], 0)
    found += folder_findings([own], seen, asked=path is not None)
    try:
        mpi = find()
    except UsageError as error:
        what, _, do = str(error).partition(" Install an MPI:\n")
        found.append(
            note(f"{what[0].upper()}{what[1:]} One process, on any number of devices, needs none.", do.strip())
        )
        return Examination((own,), tuple(found), folder=seen)
    found += (other := list(launcher_findings(mpi, own)))
    tried = None
    if trial and not other:
        tried, trouble = _try(path, seconds)
        found += [] if trouble is None else [trouble]
    return Examination((own,), tuple(found), folder=seen, mpirun=f"{mpi}, {mpi.path}", trial=tried)


def examine_job(path: Path | None, doing: list[str]) -> Examination:
    """Examine the job of this rank. Called by all ranks. The findings are complete on rank 0.

    Args:
      path: see `examine_process`.
      doing: receives a description of each activity as it starts, for the report of a hanging one.
    """
    doing.append("asking JAX for its devices")
    own = facts()
    doing.append("loading MPI")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world = MPIWorld(hang_timeout=0)
    except Exception as error:
        own = replace(own, trouble=str(error))
        return Examination((own,), tuple(_findings([own])))
    with world:
        own = replace(own, rank=world.rank, processes=world.processes, library=world.library, survives=world.survives)
        doing.append("gathering what ranks know")
        ranks = [as_facts(json.loads(text)) for text in world.all_gather_bytes(json.dumps(vars(own)).encode())]
        doing.append("measuring latency and bandwidth")
        comm = world.transport.comm
        found_links, together = links(comm), exchange(comm) if world.processes > 1 else None
        pairs = host_pairs(comm, sorted({own.host: rank for rank, own in reversed([*enumerate(ranks)])}.values()))
        doing.append("looking at files")
        seen = folder(path or Path.cwd(), world.all_gather_bytes, world.rank)
        doing.append("ending")
    found = [*_findings(ranks), *clock_findings(ranks, found_links), *link_findings(ranks, pairs)]
    found += [*folder_findings(ranks, seen, asked=path is not None)]
    return Examination(tuple(ranks), tuple(found), tuple(found_links), tuple(pairs), together, seen)


def _findings(ranks: list[JobFacts]) -> Iterator[HealthCheck]:
    first = {own.host: own for own in reversed(ranks)}
    yield from dict.fromkeys(finding for own in first.values() for finding in process_findings(own))
    yield from job_findings(ranks)


def _library() -> str:
    """Return the version string of mpi4py's MPI. Runs in another process, because a broken MPI ends its process."""
    command = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    try:
        done = subprocess.run(command, env=clean(), capture_output=True, text=True, errors="replace", timeout=60)
    except subprocess.TimeoutExpired:
        return ""
    return (done.stdout.strip("\0\n ").splitlines() or [""])[0] if done.returncode == 0 else ""


def _try(path: Path | None, seconds: float) -> tuple[Examination | None, HealthCheck | None]:
    """Start a job of two ranks as `adaptive run` would, and return its own examination."""
    with tempfile.TemporaryDirectory(prefix="adaptive-doctor-") as name:
        into = Path(name) / "found.json"
        where = [] if path is None else ["--path", str(path)]
        doctor = ["-m", "collectives.doctor", "--into", str(into), "--timeout", str(seconds), *where]
        job = subprocess.Popen(
            [sys.executable, "-m", "launchers.run", "-n", str(TRIAL_RANKS), *doctor],
            env=clean(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
        try:
            said, _ = job.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            said = _end(job)
            why = f"did not end within {seconds:g} s (--timeout)"
        else:
            why = f"ended with exit code {job.returncode}"
        if into.exists():
            return as_examination(json.loads(into.read_text())), None
    last = "\n".join(said.strip().splitlines()[-15:])
    return None, wrong(
        f"A job of {TRIAL_RANKS} ranks {why}. Its last output:\n{last}", "adaptive run -n 2 -m collectives.doctor"
    )


def _end(job: subprocess.Popen) -> str:
    tree = psutil.Process(job.pid).children(recursive=True)
    job.terminate()
    try:
        said, _ = job.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        for process in tree:
            if process.is_running():
                process.kill()
        job.kill()
        said, _ = job.communicate()
    return said


# --- as plain data ----------------------------------------------------------------------------------------------------


def as_facts(said: Mapping[str, Any]) -> JobFacts:
    """Return the facts in a JSON object."""
    return JobFacts(**{**said, "cpus": tuple(said["cpus"]), "devices": tuple(said["devices"])})


def as_examination(said: Mapping[str, Any]) -> Examination:
    """Return the examination in a JSON object that `--json` or `--into` has written."""
    seen = said["folder"]
    return Examination(
        ranks=tuple(as_facts(own) for own in said["ranks"]),
        findings=tuple(HealthCheck(**finding) for finding in said["findings"]),
        links=tuple(LinkTimes(**link) for link in said["links"]),
        pairs=tuple(HostPair(tuple(pair["ranks"]), pair["bandwidth"]) for pair in said["pairs"]),
        exchange=ExchangeTimes(**said["exchange"]) if said["exchange"] else None,
        folder=Folder(**{**seen, "unseen": tuple(seen["unseen"])}) if seen else None,
        mpirun=said["mpirun"],
        trial=as_examination(said["trial"]) if said["trial"] else None,
    )
