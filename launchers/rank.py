"""The program that the launcher starts on each rank: `python rank.py train.py …`, `-m module …`, or `-- command …`.

It replaces `python -m mpi4py`. A rank that fails does not abort the others but reports to the launcher, which knows
whether they end by themselves. The rank is a child of the process that mpirun starts (`supervisor.py`). This file and
what it uses of this package import only the standard library: JAX reads some of its settings when it is imported, and
scripts set them before that.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # this file was started by its path; the script must not find this folder
    sys.path[: not sys.flags.safe_path] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    from launchers import ending, resources, supervisor

    del sys.path[0]

import runpy
import signal
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NoReturn


def run(arguments: list[str], show: Callable[[str], object]) -> int:
    """Run a script, or a module after `-m`, with its arguments, as Python does, and return its exit code; `show` prints
    the error by which it ends.
    """
    try:
        if arguments[0] == "-m":
            sys.argv[:] = arguments[1:]
            if not sys.flags.safe_path:
                sys.path.insert(0, "")
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = arguments
            if not sys.flags.safe_path:
                sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code & 0xFF
        if end.code is not None:
            show(f"{end.code}\n")
        return int(end.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next  # skip the frames above the script
        if isinstance(error, KeyboardInterrupt):
            show("KeyboardInterrupt\n")
            return 128 + signal.SIGINT
        with redirect_stderr(StringIO()) as text:  # not line by line, between the lines of other ranks
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        show(text.getvalue())
        return 1
    return 0


def execute(command: list[str]) -> NoReturn:
    """Replace this process by a command. Raises SystemExit, with code 127, if it cannot be run."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"adaptive run: {command[0]} cannot be run: {error.strerror}\n")
        raise SystemExit(127) from error


if __name__ == "__main__":
    resources.see_own_gpus(os.environ)
    resources.take_cores(os.environ, resources.cpu_quota())
    command = sys.argv[1] == "--"
    supervisor.supervise(os.environ, command)
    if command:
        execute(sys.argv[2:])
    ending.prepare()
    code = run(sys.argv[1:], ending.show_error)
    ending.ends(code)
    sys.exit(code)
