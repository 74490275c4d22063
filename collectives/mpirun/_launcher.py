"""`python -m collectives.mpirun`: start the MPI's own launcher, and see to it that the job ends, and how."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Sequence

from collectives.worlds.ending import LAUNCHER

from ._command import UsageError, clean, find, line, settings, split
from ._job import Job, addresses

_HELP = """\
usage: python -m collectives.mpirun [--show] [--grace S] [--detect S] [options of mpirun] PROGRAM ...

Starts a job as mpirun does, with what has to be said to it each time, and ends with the right exit code.

PROGRAM is one of
  train.py ...         a script
  -m train ...         a module
  python train.py ...  the same, with a Python of its own
  -- COMMAND ...       anything else; it runs as it is

  --show      print the command that would be run, and do not run it
  --grace S   seconds between a signal (SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP), which is passed to all
              ranks, and the end of what is still there. SIGUSR1 and SIGUSR2 alone end nothing. Default: 30
  --detect S  seconds after which a host that does not answer is cut off: its ranks end, and the others go on
              without them. Default: 30

All other options are mpirun's: -n 4, -H h1:2,h2:2, --hostfile F, --oversubscribe, -x NAME, ...
The launcher is the one that lies beside this Python, else the first on the PATH. For Open MPI 5 it is told
--with-ft ulfm, so that the others go on when ranks are lost, and OMPI_MCA_coll=^han, so that they do so rightly.

Exit code: 0 if the program ended well, whoever was lost or left on the way. Else the code of the first rank that
ended badly. Within 5 seconds of the end of the program, whatever mpirun does.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job; returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser("python -m collectives.mpirun", add_help=False, allow_abbrev=False)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--grace", type=_seconds, default=30.0)
    parser.add_argument("--detect", type=_seconds, default=30.0)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0 if words else 2
    try:
        options, program = split(words)
        ours, options = parser.parse_known_args(options)
        mpi = find()
    except UsageError as error:
        sys.stderr.write(f"python -m collectives.mpirun: {error}\n")
        return 2
    command = line(mpi, options, program, [LAUNCHER])
    extra = settings(mpi, options, os.environ)
    if ours.show:
        set_ = [f"{name}={value}" for name, value in extra.items()]
        sys.stdout.write(shlex.join([*(["env", *set_] if set_ else []), *command]) + "\n")
        return 0
    return asyncio.run(Job(command, {**clean(), **extra}, ours.grace, ours.detect, addresses()).run())


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"seconds are more than 0; got {text}")
    return seconds
