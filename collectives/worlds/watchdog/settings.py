"""Detection of stuck ranks: they are reported after `hang_timeout`, and ended after twice that; slow ranks are not.

A rank that is stopped, or loops, or has left, hangs all others, since MPI waits for it without a limit. So each rank
has a thread (`watchdog.py`) that checks, a few times in `hang_timeout`, whether its world is in an operation and for
how long. If that is longer than `hang_timeout`, the thread asks all other ranks for their state, by datagrams
(`probe.py`): it needs Python's lock for moments, and no MPI.

* A rank that is in the operation, or waits for XLA's compiler, is well.
* A rank that is elsewhere, or does not answer, after the others have waited for `hang_timeout`, is *stuck*, and is
  reported, once.
* A rank that still is after twice `hang_timeout` is killed by a rank of its host, if its loss is survived; otherwise
  the job ends.
* A rank that has left, or whose process is gone, is not waited for.

The wait for a rank is the longest time that any rank has waited in this operation; it starts again whenever the rank is
seen compiling. Of the ranks that wait, the one whose timeout ends first asks, and the others leave it to that one.
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
from .watchdog import Watchdog, WatchedTransport

HANG_TIMEOUT = 60.0  # seconds, by default
_SHOWN = 8


def check_hang_timeout(hang_timeout: Any) -> float:
    """Return `hang_timeout` as seconds; 0 disables the watchdog.

    Raises:
      CollectiveError: it is not a number of seconds.
    """
    seconds = real(hang_timeout)
    if seconds is None or not isfinite(seconds) or seconds < 0:
        raise CollectiveError(
            f"hang_timeout={brief(hang_timeout)}: write the seconds after which a rank that keeps others waiting is "
            f"reported as stuck ({HANG_TIMEOUT:g} by default), or 0 to wait without a limit."
        )
    return seconds


def introduce(number: int, group: int, hang_timeout: float) -> tuple[Peer, UDPSocket | None]:
    """Return what this rank tells all others of itself, and the socket at which they reach it.

    Args:
      number: its rank.
      group: the same for all ranks of its host: the least of their numbers.
    """
    if not hang_timeout:
        return Peer(number, group, ProcessId("", os.getpid(), 0.0, "", -1), (), b"", hang_timeout), None
    socket = UDPSocket()
    key = secrets.token_bytes(32)
    return Peer(number, group, this_process(), tuple(socket.addresses), key, hang_timeout), socket


def start_watchdog(
    transport: WatchedTransport,
    peers: Sequence[Peer],
    own: int,
    socket: UDPSocket | None,
    abort: Callable[[int], object],
) -> Watchdog | None:
    """Start to watch over these ranks; returns None where there are no others, or `hang_timeout` is 0.

    Args:
      peers: all ranks; `own`: this one among them; `socket`: its.
      abort: ends all processes of the job with a status; called from any thread.

    Raises:
      DisagreementError: `hang_timeout` differs between ranks. On every rank.
    """
    if len({peer.hang_timeout for peer in peers}) > 1:
        values = ", ".join(f"rank {peer.number}: {peer.hang_timeout:g}" for peer in peers[:_SHOWN])
        rest = ", …" if len(peers) > _SHOWN else ""
        if socket is not None:
            socket.close()
        raise DisagreementError(f"hang_timeout= is not the same on all ranks: {values}{rest}")
    if socket is None:
        return None
    if len(peers) == 1:
        socket.close()
        return None
    return Watchdog(transport, Probe(peers, own, socket), peers[own].hang_timeout, abort)
