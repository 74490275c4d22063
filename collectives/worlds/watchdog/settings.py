"""Ranks that do not come are told from ranks that are slow: named after `hang_timeout`, and after twice that, ended.

A rank that is stopped, or loops, or has left, hangs all others: MPI waits for it without end. So each rank has a
thread (`watch.py`) that looks, a few times in `hang_timeout`, whether its world is in an operation and for how long. If
it has been for longer than `hang_timeout`, the thread asks all other ranks where they are, by datagrams (`asking.py`):
it needs Python's lock for moments, and MPI not at all.

* Who is in the operation, or waits for XLA's compiler, is well.
* Who is elsewhere, or does not answer, while it has been waited for `hang_timeout`, is *stuck*, and is named: once.
* Who still is after twice `hang_timeout` is killed by a rank of its host, where its loss is survived; else the job
  ends.
* Who has left, or is not there any more, is not waited for at all.

How long a rank is waited for is the longest that any rank has waited in this operation, and counts anew from when it
was last seen compiling. Of ranks that wait, the one whose hang_timeout ends first asks, and the others leave it to that
one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from adaptive import CollectiveError, DisagreementError
from adaptive.extend import brief, real

from .probe import Peer, Probe
from .stacks import ProcessId, this_process
from .udp import UDPSocket
from .watchdog import Watchdog, WatchedWorld

SECONDS = 60.0  # by default
_SHOWN = 8


def checked(hang_timeout: Any) -> float:
    """Return `hang_timeout` as seconds; 0 disables the watchdog.

    Raises:
      CollectiveError: it is no number of seconds.
    """
    seconds = real(hang_timeout)
    if seconds is None or not isfinite(seconds) or seconds < 0:
        raise CollectiveError(
            f"hang_timeout={brief(hang_timeout)}: write the seconds after which a rank that keeps others waiting is "
            f"reported as stuck ({SECONDS:g} by default), or 0 to wait without a limit."
        )
    return seconds


def introduce(number: int, group: int, hang_timeout: float) -> tuple[Peer, UDPSocket | None]:
    """What a rank tells all others of itself, and the socket by which they reach it.

    Args:
      number: its rank.
      group: the same for all ranks of its host: the least of their numbers.
    """
    if not hang_timeout:
        return Peer(number, group, ProcessId("", os.getpid(), 0.0, "", -1), (), b"", hang_timeout), None
    datagrams = UDPSocket()
    key = secrets.token_bytes(32)
    return Peer(number, group, this_process(), tuple(datagrams.addresses), key, hang_timeout), datagrams


def watch(
    world: WatchedWorld, peers: Sequence[Peer], own: int, datagrams: UDPSocket | None, abort: Callable[[int], object]
) -> Watchdog | None:
    """Start to watch over a world of these ranks; `None` where there are no others, or hang_timeout is 0.

    Args:
      abort: ends all processes of the job with a status, from any thread.

    Raises:
      DisagreementError: hang_timeout is not the same on all ranks. On every rank.
    """
    if len({peer.hang_timeout for peer in peers}) > 1:
        said = ", ".join(f"rank {peer.number}: {peer.hang_timeout:g}" for peer in peers[:_SHOWN])
        rest = ", …" if len(peers) > _SHOWN else ""
        if datagrams is not None:
            datagrams.close()
        raise DisagreementError(f"hang_timeout= is not the same on all ranks: {said}{rest}")
    if datagrams is None:
        return None
    if len(peers) == 1:
        datagrams.close()
        return None
    return Watchdog(world, Probe(peers, own, datagrams), peers[own].hang_timeout, abort)
