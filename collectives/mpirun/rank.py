"""What the launcher starts on each rank: `python rank.py train.py …`, or `python rank.py -m module …`.

As `python -m mpi4py`, but a rank that fails does not abort the others: it tells the launcher, who knows whether they
end by themselves. It is started by its path, so that nothing is imported that the script has not asked for: JAX reads
some of its settings when it is imported, and scripts set them before.
"""

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this folder

import importlib.util
import runpy
import signal
from pathlib import Path
from types import ModuleType

ENDING = "collectives.worlds.ending"


def load_ending() -> ModuleType:
    """The module, without its package: whoever imports that later finds it."""
    spec = importlib.util.spec_from_file_location(ENDING, Path(__file__).parents[1] / "worlds" / "ending.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[ENDING] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(arguments: list[str]) -> int:
    """Run a script, or a module after `-m`, as Python does; returns its exit code."""
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
            sys.stderr.write(f"{end.code}\n")
        return int(end.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next  # what is not the script's
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    ending = load_ending()
    ending.prepare()
    code = run(sys.argv[1:])
    ending.ends(code)
    sys.exit(code)
