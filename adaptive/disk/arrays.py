"""Write and read arrays by orbax. The only module that imports it, on first use."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def write(arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write non-empty arrays to a new folder, and flush them to the disk.

    Raises:
      OSError: the system refuses the write, such as for a full disk.
      Exception: another error of orbax or its libraries.
    """
    import orbax.checkpoint as ocp

    with _errors_are_raised_only(), _checkpointer() as checkpointer:
        as_they_are = {name: array.view(_NotCopied) for name, array in arrays.items()}
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(as_they_are))


def read(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays that `write` wrote."""
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in metadata.tree}
        found = checkpointer.restore(folder.absolute(), args=ocp.args.PyTreeRestore(restore_args=how))
    return {name: np.asarray(value) for name, value in found.items()}


_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


@contextmanager
def _errors_are_raised_only() -> Iterator[None]:
    """Raise errors of writing, and keep orbax and tensorstore from printing their tracebacks besides.

    orbax logs an error in each of its threads. It then closes its event loop, and every array that tensorstore is still
    writing prints that the loop is closed, also when this has returned.
    """
    absl, hook = logging.getLogger("absl"), _WithoutClosedLoops(sys.unraisablehook)
    absl.addFilter(_not_of_orbax)
    sys.unraisablehook = hook
    try:
        yield
    except Exception as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
    else:
        if sys.unraisablehook is hook:
            sys.unraisablehook = hook.before
    finally:
        absl.removeFilter(_not_of_orbax)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or f"{os.sep}orbax{os.sep}" not in record.pathname


class _WithoutClosedLoops:
    """An `unraisablehook` that ignores "Event loop is closed" from calls outside Python code."""

    before: Callable[[Any], Any]

    def __init__(self, before: Callable[[Any], Any]):
        self.before = before.before if isinstance(before, _WithoutClosedLoops) else before

    def __call__(self, unraisable: Any) -> None:
        trace = unraisable.exc_traceback
        of_a_loop = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
        if not (of_a_loop and isinstance(unraisable.exc_value, RuntimeError)):
            self.before(unraisable)


class _NotCopied(np.ndarray):
    """An array that orbax need not copy before writing, because it doesn't change meanwhile."""

    def __deepcopy__(self, memo: Any) -> _NotCopied:
        return self


def load_library() -> None:
    """Import orbax now, rather than beside a step."""
    import orbax.checkpoint  # noqa: F401


def _checkpointer() -> ocp.Checkpointer:
    """Return an orbax checkpointer for this process alone, without barriers between processes.

    Nothing is compressed: weights hardly shrink, and compression would occupy the cores for several times as long.
    """
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone: dict[str, Any] = {"primary_host": own, "active_processes": {own}, "barrier_sync_key_prefix": f"process{own}"}
    options = ocp.options.MultiprocessingOptions(**alone)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)
