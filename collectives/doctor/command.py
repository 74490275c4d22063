"""The command `adaptive doctor`: examines this process and a job of two ranks, or the job that it is a rank of."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
import warnings
from textwrap import indent
from typing import Any

import click

from adaptive.base.process.launcher import launcher
from collectives.worlds.mpi import MPIWorld
from launchers.mpirun import UsageError, clean, find

from .checks import HealthCheck, describe_ranks, findings, hosts
from .facts import facts

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
    own = facts()
    if launcher() is None:
        found = examine_process(own, trial, timeout)
    else:
        faulthandler.dump_traceback_later(timeout, exit=True)  # it may be blocked in MPI
        found = examine_job(own)
        faulthandler.cancel_dump_traceback_later()
    if own["rank"] == 0:
        click.echo(json.dumps(found, indent=2) if as_json else "\n".join(described(found)))
    sys.exit(0 if found["ok"] else 1)


def _judged(found: dict[str, Any], *more: HealthCheck) -> dict[str, Any]:
    """Add the findings of all checks, `more`, and those of the trial to an examination."""
    of_trial = [HealthCheck(**finding) for finding in found.get("trial", {}).get("findings", [])]
    all_found = dict.fromkeys([*findings(found["ranks"]), *more, *of_trial])
    ok = all(finding.level != "wrong" for finding in all_found)
    return {**found, "findings": [finding._asdict() for finding in all_found], "ok": ok}


def examine_process(own: dict[str, Any], trial: bool, seconds: float) -> dict[str, Any]:
    """Examine this process, which was started without a launcher, and in a `trial` a job of two ranks."""
    try:
        find()
    except UsageError as error:
        return _judged({"ranks": [own]}, HealthCheck("note", f"One process needs no MPI. For several: {error}"))
    if not trial:
        return _judged({"ranks": [own]})
    examined = _try(seconds)
    if isinstance(examined, str):
        return _judged({"ranks": [own]}, HealthCheck("wrong", examined, "adaptive run -n 2 -m adaptive doctor"))
    return _judged({"ranks": [own], "trial": examined})


def examine_job(own: dict[str, Any]) -> dict[str, Any]:
    """Examine the job of this rank. Called by all ranks. Adds to the facts about this process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world = MPIWorld(hang_timeout=0)
    except Exception as error:
        return _judged({"ranks": [{**own, "trouble": str(error)}]})
    with world:
        own |= {name: getattr(world, name) for name in ("rank", "library", "survives")}
        ranks = [json.loads(text) for text in world.all_gather_bytes(json.dumps(own).encode())]
    return _judged({"ranks": ranks})


def _try(seconds: float) -> dict[str, Any] | str:
    """Start a job of two ranks as `adaptive run` would. Returns its own examination, or why there is none."""
    command = [sys.executable, "-m", "launchers.run", "-n", str(TRIAL_RANKS), "-m", "adaptive", "doctor", "--json"]
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


def described(found: dict[str, Any]) -> list[str]:
    """Return the lines that describe an examination."""
    first, n, there = found["ranks"][0], len(found["ranks"]), len(hosts(found["ranks"]))
    title = f"{n} rank{'s' * (n > 1)} on {there} host{'s' * (there > 1)}"
    lines = [title if first["launcher"] else f"this process, on {first['host']}", *_table(found)]
    if found.get("trial"):
        lines += [f"a job of {TRIAL_RANKS} ranks, started by adaptive run", *_table(found["trial"])]
    for finding in sorted(found["findings"], key=lambda finding: finding["level"], reverse=True):
        lines.append(f"{'✗' if finding['level'] == 'wrong' else '·'} {finding['what']}")
        lines += [indent(finding["do"], "    ")] if finding["do"] else []
    bad = sum(finding["level"] == "wrong" for finding in found["findings"])
    return [*lines, f"{bad} problem{'s' * (bad > 1)}" if bad else "✓ no problems"]


def _table(found: dict[str, Any]) -> list[str]:
    first = found["ranks"][0]
    rows = {"versions": ", ".join(f"{name} {text}" for name, text in first["versions"].items())}
    if first["launcher"]:
        survives = "; continues when a rank dies" if first["survives"] else ""
        library = " ".join(first["library"].partition(",")[0].split())
        rows["MPI"] = f"{library or 'none'}, started by {first['launcher']}{survives}"
    for there in hosts(found["ranks"])[:MOST_HOSTS]:
        cpus = dict.fromkeys(f"{own['cpus'][0]}–{own['cpus'][-1]}" for own in there)
        devices = dict.fromkeys(name for own in there for name in own["devices"])
        which = describe_ranks([own["rank"] for own in there])
        rows[there[0]["host"]] = f"{which}; cores {' | '.join(cpus)}; {', '.join(devices) or 'no devices'}"
    return [f"  {name:<13}  {text}" for name, text in rows.items()]
