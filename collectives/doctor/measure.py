"""Measurements among the ranks of a job: bandwidths between hosts, and whether all see the same files.

All ranks call these functions together.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 1 << 20  # many times what a shaper lets through at once
MOST_PAIRS = 120  # of hosts: all of 16, and of more hosts each with its neighbors
SEEN_SECONDS = 3.0  # time for a network file system to show a new file


def host_pairs(comm: Any, hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the bandwidth between each two hosts, in bytes per second and in each direction at once.

    Args:
      hosts: the host of each rank.
    """
    leaders = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    pairs = sorted(combinations(leaders, 2), key=lambda pair: abs(leaders[pair[0]] - leaders[pair[1]]))[:MOST_PAIRS]
    found = []
    sent, received = np.zeros(CHUNK_BYTES, np.uint8), np.zeros(CHUNK_BYTES, np.uint8)
    for a, b in pairs:
        comm.Barrier()
        if comm.rank in (leaders[a], leaders[b]):
            other, took = leaders[b] if comm.rank == leaders[a] else leaders[a], []
            for _ in range(4):  # the fastest counts: other work on a host only adds time
                start = time.perf_counter()
                comm.Sendrecv(sent, other, recvbuf=received, source=other)
                took.append(time.perf_counter() - start)
            if comm.rank == leaders[a]:
                found.append({"hosts": [a, b], "bandwidth": CHUNK_BYTES / max(min(took), 1e-9)})
    return [pair for of_rank in comm.allgather(found) for pair in of_rank]


def folder(path: Path, gather: Callable[[bytes], list[bytes]], rank: int) -> dict[str, Any]:
    """Return why rank 0 cannot write into a folder ("trouble"), and which ranks do not see its file ("unseen").

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
    unseen = [r for r, answer in enumerate(gather(b"1" if seen else b"0")) if answer == b"0"]
    if rank == 0 and not trouble:
        (path / name).unlink(missing_ok=True)
    return {"path": str(path), "trouble": trouble, "unseen": unseen}


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
