"""Settings of the watchdog: stuck ranks are reported after `hang_timeout`, and ended after twice that time.

By default the time depends on what a rank does: see `limits.py`.

MPI waits without a limit for a rank that is stopped, loops or has left. Each rank therefore has a thread
(`watchdog.py`) that checks how long its world has been in an operation. After `hang_timeout` the thread asks all other
ranks for their state, by datagrams (`probe.py`); it does not need MPI, and holds the GIL only briefly.

* A rank that is in the operation, or waits for XLA's compiler, is well.
* A rank that is elsewhere, or does not answer, after the others have waited for `hang_timeout`, is *stuck*. It is
  reported once.
* A rank that is still stuck after twice `hang_timeout` is killed by a rank of its host if the others can continue
  without it; otherwise the job ends.
* A rank that has left, or whose process has ended, is not waited for.

The waiting time for a rank is the longest time that any rank has waited in this operation, without the time for which
the rank waited for a core (`core_time.py`). It starts again whenever the rank is found compiling. Only the waiting rank
whose timeout ends first asks the others.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeVar

from adaptive import CollectiveError, DisagreementError
from adaptive.base.numbers import brief, real

from .limits import LONGEST
from .probe import Peer, Probe
from .stacks import ProcessId, this_process
from .udp import UDPSocket
from .watchdog import Watchdog, WatchedTransport

_SHOWN = 8
_LEAST_RANDOM = 1 << 30  # above all ranks

T = TypeVar("T")


def check_hang_timeout(hang_timeout: Any) -> float | None:
    """Return `hang_timeout` as a float, in seconds; 0 disables the watchdog, None is the default (`limits.py`).

    Raises:
      CollectiveError: it is not a number of seconds.
    """
    if hang_timeout is None:
        return None
    seconds = real(hang_timeout)
    if seconds is None or not isfinite(seconds) or seconds < 0:
        raise CollectiveError(
            f"hang_timeout={brief(hang_timeout)} must be the seconds after which a rank that keeps others waiting is "
            f"reported as stuck; 0 to wait without a limit; or None for the default, {LONGEST:g} s, and less for a "
            "rank that is stopped."
        )
    return seconds


def introduce(number: int, group: int, hang_timeout: float | None) -> tuple[Peer, UDPSocket | None]:
    """Return this rank's contact data for the others, and its socket; no socket if the watchdog is disabled.

    Args:
      number: this rank, or a `random_number`.
      group: identifies this rank's host: the least rank there.
      hang_timeout: the setting, in seconds.
    """
    if hang_timeout == 0:
        return Peer(number, group, ProcessId("", os.getpid(), 0.0, "", -1), (), b"", hang_timeout), None
    socket = UDPSocket()
    key = secrets.token_bytes(32)
    return Peer(number, group, this_process(), tuple(socket.addresses), key, hang_timeout), socket


def random_number() -> int:
    """Return a number for a spawned process, which differs from those of all other processes."""
    return _LEAST_RANDOM + secrets.randbelow(_LEAST_RANDOM)


def with_one_key(peers: Mapping[T, Peer]) -> dict[T, Peer]:
    """Return the contact data of processes with the key of the first one that has a key."""
    key = next((peer.key for peer in peers.values() if peer.key), b"")
    return {process: peer._replace(key=key) for process, peer in peers.items()}


def start_watchdog(
    transport: WatchedTransport,
    peers: Sequence[Peer],
    own: int,
    socket: UDPSocket | None,
    abort: Callable[[int], object],
) -> Watchdog | None:
    """Start this rank's watchdog. Returns None if there are no other ranks and never will be, or `hang_timeout` is 0.

    Args:
      transport: the transport to watch.
      peers: contact data of all ranks.
      own: this rank.
      socket: this rank's socket.
      abort: ends all processes of the job with an exit status; called from any thread.

    Raises:
      DisagreementError: `hang_timeout` differs between ranks. On every rank.
    """
    if len({peer.hang_timeout for peer in peers}) > 1:
        values = ", ".join(f"rank {peer.number}: {_words(peer.hang_timeout)}" for peer in peers[:_SHOWN])
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


def _words(hang_timeout: float | None) -> str:
    return "the default" if hang_timeout is None else f"{hang_timeout:g}"
