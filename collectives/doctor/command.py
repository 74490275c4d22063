"""The command `adaptive doctor`: examines this process and a job of two ranks, or the job that it is a rank of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from textwrap import indent
from typing import Any

import click
import psutil

from adaptive.base.process.launcher import launcher
from collectives.worlds.mpi import MPIWorld
from launchers.mpirun import UsageError, clean, find

from .checks import HealthCheck, describe_ranks, findings, hosts, library
from .facts import facts
from .measure import folder, host_pairs

TRIAL_RANKS = 2
MOST_HOSTS = 32  # that are shown


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--path", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Check that all hosts share this folder. Default: the working directory.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--trial/--no-trial", default=True, show_default=True,
    help="Without a launcher: start a job of 2 ranks as a test.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(1), default=120.0, show_default=True, metavar="S",
    help="Seconds after which a check that does not return is reported as hanging.")  # fmt: skip
@click.option("--into", type=click.Path(path_type=Path), hidden=True, help="Write JSON to a file, and print nothing.")
def doctor(path: Path | None, as_json: bool, trial: bool, timeout: float, into: Path | None) -> None:
    """Check this machine or job, and print each problem with the command that fixes it.

    \b
    adaptive doctor                        check this host, and start a test job of 2 ranks
    adaptive run -n 8 -m adaptive doctor   check a job; start it as you start your program
    mpirun -n 8 adaptive doctor
    srun --mpi=pmix adaptive doctor

    Exit code: 0 without problems, else 1.
    """
    speaks = True
    if launcher() is None:
        found = examine_process(path, trial, timeout)
    else:
        doing: list[str] = []
        watch = threading.Timer(timeout, _give_up, (timeout, doing))
        watch.daemon = True
        watch.start()
        found = examine_job(path, doing)
        watch.cancel()
        speaks = next((own for own in found["ranks"] if own["pid"] == os.getpid()), found["ranks"][0])["rank"] == 0
    if speaks and into is not None:
        into.write_text(json.dumps(found))
    elif speaks:
        click.echo(json.dumps(found, indent=2) if as_json else "\n".join(described(found)))
    sys.exit(0 if found["ok"] else 1)


def _give_up(seconds: float, doing: list[str]) -> None:
    """Print an error and end this process, which may be blocked in MPI."""
    own = f"{os.uname().nodename} (pid {os.getpid()})"
    sys.stderr.write(f"adaptive doctor: {own} is still {doing[-1]} after {seconds:g} s.\n")
    sys.stderr.flush()
    os._exit(1)


def _judged(found: dict[str, Any], more: list[HealthCheck]) -> dict[str, Any]:
    """Add the findings of all checks, and `more`, to an examination."""
    trial = found.get("trial") or {"findings": []}
    all_found = [*findings(found), *more, *(HealthCheck(**finding) for finding in trial["findings"])]
    found["findings"] = [finding._asdict() for finding in dict.fromkeys(all_found)]
    found["ok"] = all(finding.level != "wrong" for finding in all_found)
    return found


def examine_process(path: Path | None, trial: bool, seconds: float) -> dict[str, Any]:
    """Examine this process, which was started without a launcher. Arguments: the options."""
    own = {**facts(), "library": _library()}
    seen = folder(path or Path.cwd(), lambda text: [text], 0)
    found: dict[str, Any] = {"ranks": [own], "folder": {**seen, "asked": path is not None}}
    try:
        mpi = find()
    except UsageError as error:
        what, _, do = str(error).partition(" Install an MPI:\n")
        what = f"{what[0].upper()}{what[1:]} One process, on any number of devices, needs none."
        return _judged(found, [HealthCheck("note", what, do.strip())])
    found["mpirun"] = {"name": mpi.name, "path": mpi.path}
    more: list[HealthCheck] = []
    if trial and (not mpi.name or own["library"].startswith(mpi.name)):
        found["trial"], said = _try(path, seconds)
        more += [HealthCheck("wrong", said, "adaptive run -n 2 -m collectives.doctor")] if said else []
    return _judged(found, more)


def examine_job(path: Path | None, doing: list[str]) -> dict[str, Any]:
    """Examine the job of this rank. Called by all ranks.

    Args:
      path: the folder that all hosts should share; by default the working directory.
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
        return _judged({"ranks": [{**own, "trouble": str(error)}]}, [])
    with world:
        own |= {name: getattr(world, name) for name in ("rank", "processes", "library", "survives")}
        doing.append("gathering what ranks know")
        ranks = [json.loads(text) for text in world.all_gather_bytes(json.dumps(own).encode())]
        doing.append("measuring the bandwidth between hosts")
        found: dict[str, Any] = {"ranks": ranks}
        found["pairs"] = host_pairs(world.transport.comm, [own["host"] for own in ranks])
        doing.append("looking at files")
        found["folder"] = {**folder(path or Path.cwd(), world.all_gather_bytes, world.rank), "asked": path is not None}
        doing.append("ending")
    return _judged(found, [])


def _library() -> str:
    """Return the version string of mpi4py's MPI. Runs in another process, because a broken MPI ends its process."""
    command = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"]
    try:
        done = subprocess.run(command, env=clean(), capture_output=True, text=True, errors="replace", timeout=60)
    except subprocess.TimeoutExpired:
        return ""
    return (done.stdout.strip("\0\n ").splitlines() or [""])[0] if done.returncode == 0 else ""


def _try(path: Path | None, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Start a job of two ranks as `adaptive run` would. Returns its own examination, or why there is none."""
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
            why = f"ended with exit code {job.returncode}"
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
            said, _ = job.communicate()
            why = f"did not end within {seconds:g} s (--timeout)"
        if into.exists():
            return json.loads(into.read_text()), ""
    last = "\n".join(said.strip().splitlines()[-15:])
    return None, f"A job of {TRIAL_RANKS} ranks {why}. Its last output:\n{last}"


# --- for people -------------------------------------------------------------------------------------------------------


def described(found: dict[str, Any]) -> list[str]:
    """Return the lines that describe an examination."""
    first, n, there = found["ranks"][0], len(found["ranks"]), hosts(found["ranks"])
    title = f"{n} rank{'s' * (n > 1)} on {len(there)} host{'s' * (len(there) > 1)}"
    lines = [title if first["launcher"] else f"this process, on {first['host']}"]
    lines += _facts({"python": first["python"], **first["versions"]}, found)
    if found.get("trial"):
        lines += [f"a job of {TRIAL_RANKS} ranks, started by adaptive run", *_facts({}, found["trial"])]
    for finding in sorted(found["findings"], key=lambda finding: finding["level"], reverse=True):
        lines.append(f"{'✗' if finding['level'] == 'wrong' else '·'} {finding['what']}")
        lines += [indent(finding["do"], "    ")] if finding["do"] else []
    bad = sum(finding["level"] == "wrong" for finding in found["findings"])
    well = "✓ no errors; see the notes above" if found["findings"] else "✓ no problems"
    return [*lines, f"{bad} problem{'s' * (bad > 1)}" if bad else well]


def _facts(versions: dict[str, str], found: dict[str, Any]) -> list[str]:
    first, rows = found["ranks"][0], []
    if versions:
        rows.append(("versions", ", ".join(f"{name} {text}" for name, text in versions.items())))
    if first["library"] or first["launcher"]:
        by = f", started by {first['launcher']}" if first["launcher"] else ""
        survives = "; continues when a rank dies" if first["survives"] else ""
        rows.append(("MPI", f"{library(first) or 'none'}{by}{survives}"))
    if pairs := found.get("pairs"):
        rates = [pair["bandwidth"] / 1e9 for pair in pairs]
        rows.append(("host ↔ host", f"{min(rates):.3g} to {max(rates):.3g} GB/s, each way at once"))
    if seen := found.get("folder"):
        unseen = f"not seen by {describe_ranks(seen['unseen'])}" if seen["unseen"] else "seen by all"
        rows.append(("files", f"{seen['path']}: {unseen}"))
    for host, there in list(hosts(found["ranks"]).items())[:MOST_HOSTS]:
        cpus = [f"{own['cpus'][0]}–{own['cpus'][-1]}" if len(own["cpus"]) > 1 else str(own["cpus"][0]) for own in there]
        devices = dict.fromkeys(name for own in there for name in own["devices"])
        which = describe_ranks([own["rank"] for own in there])
        rows.append((host, f"{which}; cores {' | '.join(dict.fromkeys(cpus))}; {', '.join(devices) or 'no devices'}"))
    return [f"  {name:<13}  {text}" for name, text in rows]
