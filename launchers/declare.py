"""Declares a process failed to Open MPI, which does not notice when a host is cut off from the network.

MPI has no call for this. Open MPI's own failure detectors call `ompi_errhandler_proc_failed_internal`, a symbol that
the library exports but does not document (tested with 5.0.11). Its argument is a process record, which
`ompi_proc_for_name` finds by job number and rank. The job number is read from the memory of this process's own record;
if the rank found there is not this process's rank, the layout is a different one and nothing is done. After the call,
every MPI call that waits for the failed process, in any thread, returns MPI_ERR_PROC_FAILED.

Every remaining process must make this declaration, because those that have not made it keep waiting.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

_NAME = 40  # offset of the name in a process record, in bytes: after the list item (16 bytes of object and 24 of list)
_STATUS = -50  # an arbitrary error code; it appears only in debug messages


def declare_lost(rank: int, own: int) -> bool:
    """Declare a process failed to Open MPI. Returns whether that succeeded.

    Args:
      rank: the failed process's rank in COMM_WORLD.
      own: this process's rank in COMM_WORLD.
    """
    library = _library()
    if library is None or rank == own:
        return False
    record = ctypes.c_void_p.in_dll(library, "ompi_proc_local_proc").value
    if record is None:
        return False
    name = ctypes.c_uint64.from_address(record + _NAME).value  # the job in the lower half, the rank in the upper
    if name >> 32 != own:
        return False
    find, fail = library.ompi_proc_for_name, library.ompi_errhandler_proc_failed_internal
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_uint64]
    fail.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_bool]
    process = find(name & 0xFFFFFFFF | rank << 32)
    return process is not None and fail(process, _STATUS, False) == 0


def _library() -> Any:
    """Return the Open MPI library that this process has loaded, or None if it lacks the needed symbols."""
    maps = Path("/proc/self/maps")
    paths = re.findall(r"\S*/libmpi\.so\S*", maps.read_text()) if maps.exists() else []
    if not paths:
        return None
    library = ctypes.CDLL(paths[0])
    needed = ("ompi_proc_local_proc", "ompi_proc_for_name", "ompi_errhandler_proc_failed_internal")
    return library if all(hasattr(library, name) for name in needed) else None
