"""The command `adaptive doctor`."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import click

from adaptive.base.launcher import launcher

from .examine import Examination, examine_job, examine_process
from .show import show


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
    if launcher() is None:
        found, speaks = examine_process(path, trial, timeout), True
    else:
        doing: list[str] = []
        watch = threading.Timer(timeout, _give_up, (timeout, doing))
        watch.daemon = True
        watch.start()
        found = examine_job(path, doing)
        watch.cancel()
        speaks = next((own for own in found.ranks if own.pid == os.getpid()), found.ranks[0]).rank == 0
    if into is not None and speaks:
        into.write_text(_json(found))
    elif speaks:
        click.echo(_json(found)) if as_json else show(found)
    sys.exit(0 if found.ok else 1)


def _json(found: Examination) -> str:
    return json.dumps({"ok": found.ok, **asdict(found)}, indent=2)


def _give_up(seconds: float, doing: list[str]) -> None:
    """Print an error and end this process, which may be blocked in MPI."""
    own = f"{os.uname().nodename} (pid {os.getpid()})"
    sys.stderr.write(f"adaptive doctor: {own} is still {doing[-1]} after {seconds:g} s.\n")
    sys.stderr.flush()
    os._exit(1)
