"""Telling Open MPI that a process is lost where it cannot know: its host is cut off, and nothing comes back from it.

MPI has no call for that. Open MPI has a function that its own detectors call (`ompi_errhandler_proc_failed_internal`),
exported, and no part of its interface: tried with 5.0.11. It takes a process, which another one finds by a name: a
number of the job, and the rank. The number is that of this process, whose record is looked at where it lies; it is made
sure that the rank there is the own one, or nothing is done. What waits for the lost process, in any thread, gets
MPI_ERR_PROC_FAILED then.

All who are left have to be told, or they wait for each other.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

_NAME = 40  # bytes into the record of a process: behind an object (16) in a list (24)
_STATUS = -50  # any error; it goes into messages for developers


def declare_lost(rank: int, own: int) -> bool:
    """Let Open MPI take a process for dead; False where that is not possible.

    Args:
      rank: of the lost one, in COMM_WORLD.
      own: this process's.
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
    """Open MPI, if this process has loaded it, and it has what is needed."""
    maps = Path("/proc/self/maps")
    paths = re.findall(r"\S*/libmpi\.so\S*", maps.read_text()) if maps.exists() else []
    if not paths:
        return None
    library = ctypes.CDLL(paths[0])
    needed = ("ompi_proc_local_proc", "ompi_proc_for_name", "ompi_errhandler_proc_failed_internal")
    return library if all(hasattr(library, name) for name in needed) else None
