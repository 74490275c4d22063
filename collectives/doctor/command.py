"""The command `adaptive doctor`: examines this process and a job of two ranks, or the job that it is a rank of."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import warnings
from textwrap import indent
from typing import Any

import click

from adaptive.base.process.launcher import launcher
from collectives.worlds.mpi import MPIWorld
from launchers.mpirun import UsageError, clean, find

from .checks import CHECKS, HealthCheck, describe_ranks, hosts
from .facts import facts, host_pairs

TRIAL_RANKS = 2
MOST_HOSTS = 32  # that are shown


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--trial/--no-trial", default=True, show_default=True,
    help="Without a launcher: start a job of 2 ranks as a test.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(1), default=120.0, show_default=True, metavar="S",
    help="Seconds after which a check that does not return is reported as hanging.")  # fmt: skip
def doctor(as_json: bool, trial: bool, timeout: float) -> None:
    """Check this machine or job, and print each problem with the command that fixes it.

    \b
    adaptive doctor                        check this host, and start a test job of 2 ranks
    adaptive run -n 8 -m adaptive doctor   check a job; start it as you start your program
    mpirun -n 8 adaptive doctor
    srun --mpi=pmix adaptive doctor

    Exit code: 0 without problems, else 1.
    """
    if launcher() is None:
        found = examine_process(trial, timeout)
    else:
        faulthandler.dump_traceback_later(timeout, exit=True)  # it may be blocked in MPI
        found = examine_job()
        faulthandler.cancel_dump_traceback_later()
    own = next((own for own in found["ranks"] if own["pid"] == os.getpid()), found["ranks"][0])
    if own["rank"] == 0:
        click.echo(json.dumps(found, indent=2) if as_json else "\n".join(described(found)))
    sys.exit(0 if found["ok"] else 1)


def _judged(found: dict[str, Any], *more: HealthCheck) -> dict[str, Any]:
    """Add the findings of all checks, `more`, and those of the trial to an examination."""
    of_trial = [HealthCheck(**finding) for finding in found.get("trial", {}).get("findings", [])]
    all_found = dict.fromkeys([*(finding for check in CHECKS for finding in check(found)), *more, *of_trial])
    ok = all(finding.level != "wrong" for finding in all_found)
    return {**found, "findings": [finding._asdict() for finding in all_found], "ok": ok}


def examine_process(trial: bool, seconds: float) -> dict[str, Any]:
    """Examine this process, which was started without a launcher. Arguments: the options."""
    found = {"ranks": [facts()]}
    try:
        find()
    except UsageError as error:
        what, _, do = str(error).partition(" Install an MPI:\n")
        what = f"{what[0].upper()}{what[1:]} One process, on any number of devices, needs none."
        return _judged(found, HealthCheck("note", what, do.strip()))
    if not trial:
        return _judged(found)
    examined = _try(seconds)
    if isinstance(examined, str):
        return _judged(found, HealthCheck("wrong", examined, "adaptive run -n 2 -m collectives.doctor"))
    return _judged({**found, "trial": examined})


def examine_job() -> dict[str, Any]:
    """Examine the job of this rank. Called by all ranks."""
    own = facts()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world = MPIWorld(hang_timeout=0)
    except Exception as error:
        return _judged({"ranks": [{**own, "trouble": str(error)}]})
    with world:
        own |= {name: getattr(world, name) for name in ("rank", "processes", "library", "survives")}
        ranks = [json.loads(text) for text in world.all_gather_bytes(json.dumps(own).encode())]
        pairs = host_pairs(world.transport.comm, [own["host"] for own in ranks])
    return _judged({"ranks": ranks, "pairs": pairs})


def _try(seconds: float) -> dict[str, Any] | str:
    """Start a job of two ranks as `adaptive run` would. Returns its own examination, or why there is none."""
    command = [sys.executable, "-m", "launchers.run", "-n", str(TRIAL_RANKS), "-m", "collectives.doctor", "--json"]
    command += ["--timeout", str(seconds)]
    try:
        done = subprocess.run(command, env=clean(), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        why, said, errors = f"ended with exit code {done.returncode}", done.stdout, done.stderr
    except subprocess.TimeoutExpired as hung:
        why, said, errors = f"did not end within {seconds:g} s (--timeout)", hung.stdout or b"", hung.stderr or b""
    try:
        text = said.decode(errors="replace")
        return json.JSONDecoder().raw_decode(text, text.index('{\n  "ranks"'))[0]
    except ValueError:
        last = "\n".join((said + errors).decode(errors="replace").strip().splitlines()[-15:])
        return f"A job of {TRIAL_RANKS} ranks {why}. Its last output:\n{last}"


# --- for people -------------------------------------------------------------------------------------------------------


def described(found: dict[str, Any]) -> list[str]:
    """Return the lines that describe an examination."""
    first, n, there = found["ranks"][0], len(found["ranks"]), hosts(found["ranks"])
    title = f"{n} rank{'s' * (n > 1)} on {len(there)} host{'s' * (len(there) > 1)}"
    lines = [title if first["launcher"] else f"this process, on {first['host']}", *_table(found)]
    if found.get("trial"):
        lines += [f"a job of {TRIAL_RANKS} ranks, started by adaptive run", *_table(found["trial"])]
    for finding in sorted(found["findings"], key=lambda finding: finding["level"], reverse=True):
        lines.append(f"{'✗' if finding['level'] == 'wrong' else '·'} {finding['what']}")
        lines += [indent(finding["do"], "    ")] if finding["do"] else []
    bad = sum(finding["level"] == "wrong" for finding in found["findings"])
    well = "✓ no errors; see the notes above" if found["findings"] else "✓ no problems"
    return [*lines, f"{bad} problem{'s' * (bad > 1)}" if bad else well]


def _table(found: dict[str, Any]) -> list[str]:
    first = found["ranks"][0]
    rows = [("versions", ", ".join(f"{name} {text}" for name, text in first["versions"].items()))]
    if first["library"] or first["launcher"]:
        by = f", started by {first['launcher']}" if first["launcher"] else ""
        survives = "; continues when a rank dies" if first["survives"] else ""
        library = " ".join(first["library"].partition(",")[0].split())
        rows.append(("MPI", f"{library or 'none'}{by}{survives}"))
    if pairs := found.get("pairs"):
        rates = [pair["bandwidth"] / 1e9 for pair in pairs]
        rows.append(("host ↔ host", f"{min(rates):.3g} to {max(rates):.3g} GB/s, each way at once"))
    for host, there in list(hosts(found["ranks"]).items())[:MOST_HOSTS]:
        cpus = [f"{own['cpus'][0]}–{own['cpus'][-1]}" if len(own["cpus"]) > 1 else str(own["cpus"][0]) for own in there]
        devices = dict.fromkeys(name for own in there for name in own["devices"])
        which = describe_ranks([own["rank"] for own in there])
        rows.append((host, f"{which}; cores {' | '.join(dict.fromkeys(cpus))}; {', '.join(devices) or 'no devices'}"))
    return [f"  {name:<13}  {text}" for name, text in rows]
