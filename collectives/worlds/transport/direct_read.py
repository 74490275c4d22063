"""Reads of another process's memory on the same host, by one copy in the kernel (Linux's `process_vm_readv`).

Open MPI uses it within a job, but reaches processes that were spawned by TCP, which takes about ten times as long. Some
systems forbid it; then nothing is read, and the caller sends messages.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_MOST = 1 << 28  # bytes of one call


class MemoryAddresses(NamedTuple):
    """Where arrays are in the memory of a process.

    Attributes:
      pid: the process, if the reader sees the same pids; else another one or none.
      token: bytes that are at the first of the addresses, by which the reader recognizes the process.
      arrays: address and bytes of the token, and of each array.
    """

    pid: int
    token: bytes
    arrays: tuple[tuple[int, int], ...]


class ShownMemory:
    """Arrays of this process that others may read, as long as this object exists.

    Attributes:
      addresses: for the readers.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        token = secrets.token_bytes(16)
        self._kept = [np.frombuffer(token, np.uint8).copy(), *arrays]
        places = tuple((array.ctypes.data, array.nbytes) for array in self._kept)
        self.addresses = MemoryAddresses(os.getpid(), token, places)


def read(shown: MemoryAddresses, into: Sequence[np.ndarray]) -> bool:
    """Read the arrays that another process shows into contiguous arrays of the same sizes.

    Returns:
      Whether all were read. If not, the contents of `into` are undefined.
    """
    copy = _process_vm_readv()
    token = np.zeros(len(shown.token), np.uint8)
    if copy is None or [array.nbytes for array in (token, *into)] != [nbytes for _, nbytes in shown.arrays]:
        return False
    for array, (address, nbytes) in zip((token, *into), shown.arrays, strict=True):
        done = 0
        while done < nbytes:
            size = min(_MOST, nbytes - done)
            got = copy(shown.pid, _Span(array.ctypes.data + done, size), 1, _Span(address + done, size), 1, 0)
            if got <= 0:
                return False
            done += got
        if array is token and token.tobytes() != shown.token:
            return False
    return True


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    def __init__(self, base: int, length: int):
        super().__init__(base, length)


def _process_vm_readv() -> Any:
    """Return the C library's function; `None` if there is none."""
    function = getattr(ctypes.CDLL(None), "process_vm_readv", None) if sys.platform == "linux" else None
    if function is not None:
        spans = ctypes.POINTER(_Span), ctypes.c_ulong
        function.argtypes, function.restype = [ctypes.c_int, *spans, *spans, ctypes.c_ulong], ctypes.c_ssize_t
    return function
