"""Measurements among ranks: clocks, latency and bandwidth, and whether they see the same files.

All ranks of a communicator call these functions together. Pairs of ranks are measured one after the other.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

PINGS = 50
LARGE_BYTES = 4 << 20
LARGE_PINGS = 4
ALL_BYTES = 16 << 20
SEEN_SECONDS = 3.0  # time for a network file system to show a new file


@dataclass(frozen=True)
class LinkTimes:
    """Times between rank 0 and another rank.

    Attributes:
      latency: seconds, one way.
      bandwidth: bytes per second.
      offset: seconds by which the other rank's clock is ahead of rank 0's.
      within: error bound of `offset` in seconds: half the fastest round trip.
    """

    rank: int
    latency: float
    bandwidth: float
    offset: float
    within: float


@dataclass(frozen=True)
class ExchangeTimes:
    """Times of an Allreduce over all ranks.

    Attributes:
      small: seconds for 8 bytes.
      large: seconds for `ALL_BYTES` bytes.
    """

    small: float
    large: float


@dataclass(frozen=True)
class Folder:
    """A folder and how the ranks see it.

    Attributes:
      kind: type of the file system on rank 0; "" if unknown.
      free: free bytes.
      trouble: why rank 0 cannot write there; "" if it can.
      unseen: ranks that do not see a file that rank 0 has written.
    """

    path: str
    kind: str
    free: int
    trouble: str
    unseen: tuple[int, ...]


def links(comm: Any) -> list[LinkTimes]:
    """Measure the link between rank 0 and each other rank. Returns the results on rank 0, and [] on other ranks."""
    found = []
    for rank in range(1, comm.size):
        comm.Barrier()
        if comm.rank == 0:
            found.append(_ping(comm, rank))
        elif comm.rank == rank:
            _pong(comm)
    comm.Barrier()
    return found


def _ping(comm: Any, rank: int) -> LinkTimes:
    theirs, took, offsets = np.zeros(1), [], []
    for _ in range(PINGS):
        start = time.time()
        comm.Send(theirs, rank)
        comm.Recv(theirs, rank)
        end = time.time()
        took.append(end - start)
        offsets.append(theirs[0] - (start + end) / 2)
    large, seconds = np.zeros(LARGE_BYTES, np.uint8), []
    for _ in range(LARGE_PINGS):
        start = time.perf_counter()
        comm.Send(large, rank)
        comm.Recv(large, rank)
        seconds.append(time.perf_counter() - start)
    best = int(np.argmin(took))
    return LinkTimes(rank, median(took) / 2, 2 * LARGE_BYTES / min(seconds), float(offsets[best]), took[best] / 2)


def _pong(comm: Any) -> None:
    mine, large = np.zeros(1), np.zeros(LARGE_BYTES, np.uint8)
    for _ in range(PINGS):
        comm.Recv(mine, 0)
        mine[0] = time.time()
        comm.Send(mine, 0)
    for _ in range(LARGE_PINGS):
        comm.Recv(large, 0)
        comm.Send(large, 0)


def exchange(comm: Any) -> ExchangeTimes:
    """Measure the median time of an Allreduce over all ranks, small and large."""

    def seconds(size: int, times: int) -> float:
        sent, received, took = np.ones(size, np.float32), np.empty(size, np.float32), []
        for _ in range(times):
            comm.Barrier()
            start = time.perf_counter()
            comm.Allreduce(sent, received)
            took.append(time.perf_counter() - start)
        return median(took)

    return ExchangeTimes(seconds(2, PINGS), seconds(ALL_BYTES // 4, 5))


def folder(path: Path, gather: Callable[[bytes], list[bytes]], rank: int) -> Folder:
    """Check whether all ranks see a file that rank 0 writes into a folder. The result is the same on all ranks.

    Args:
      path: the folder.
      gather: a collective that returns every rank's bytes, by rank.
      rank: this process's rank.
    """
    name, trouble = f".adaptive-doctor-{secrets.token_hex(8)}" if rank == 0 else "", ""
    if rank == 0:
        try:
            (path / name).write_text(name)
        except OSError as error:
            trouble = error.strerror or str(error)
    name, trouble = (text.decode() for text in gather(f"{name}\n{trouble}".encode())[0].split(b"\n", 1))
    seen = bool(trouble) or _seen(path / name)
    unseen = tuple(r for r, answer in enumerate(gather(b"1" if seen else b"0")) if answer == b"0")
    if rank == 0 and not trouble:
        (path / name).unlink(missing_ok=True)
    return Folder(str(path), kind(path), _free(path), trouble, unseen)


def _seen(file: Path) -> bool:
    until = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            os.listdir(file.parent)  # makes network file systems refresh their cache
            if file.read_text() == file.name:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def kind(path: Path, mounts: Mapping[str, str] | None = None) -> str:
    """Return the type of the file system of a folder; "" if it is unknown."""
    if mounts is None:
        mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    whole = path.resolve()
    return next((mounts[str(p)] for p in (whole, *whole.parents) if str(p) in mounts), "")


def _free(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0
