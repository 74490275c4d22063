"""What the launcher starts on each rank: `python rank.py train.py …`, `-m module …`, or `-- command …`.

As `python -m mpi4py`, but a rank that fails does not abort the others: it tells the launcher, who knows whether they
end by themselves. It is started by its path, so that nothing is imported that the script has not asked for: JAX reads
some of its settings when it is imported, and scripts set them before.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder

import importlib.util
import os
import runpy
import signal
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType

ENDING = "launchers.ending"
GPUS = "ADAPTIVE_GPUS_PER_HOST"  # set by the launcher: each rank sees one of so many
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def load_ending() -> ModuleType:
    """The module, without its package: whoever imports that later finds it."""
    spec = importlib.util.spec_from_file_location(ENDING, Path(__file__).with_name("ending.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[ENDING] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def see_one_gpu(environ: MutableMapping[str, str]) -> None:
    """Hide all GPUs but one from this rank, by its number on its host; of those that were visible before.

    Raises:
      SystemExit: there is none for it.
    """
    if GPUS not in environ:
        return
    local = next((int(environ[name]) for name in _LOCAL_RANKS if environ.get(name, "").isdigit()), None)
    gpus = [gpu for gpu in environ.get(_VISIBLE, "").split(",") if gpu] or [str(i) for i in range(int(environ[GPUS]))]
    if local is None:
        raise SystemExit(
            f"adaptive run: the launcher does not say which rank of its host this is ({_LOCAL_RANKS[0]}, …)"
        )
    if local >= len(gpus):
        raise SystemExit(
            f"adaptive run: there is no GPU for rank {local} of this host: {_VISIBLE} has {', '.join(gpus)}"
        )
    environ[_VISIBLE] = gpus[local]


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
    see_one_gpu(os.environ)
    if sys.argv[1] == "--":
        os.execvp(sys.argv[2], sys.argv[2:])
    ending = load_ending()
    ending.prepare()
    code = run(sys.argv[1:])
    ending.ends(code)
    sys.exit(code)
