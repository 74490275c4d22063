"""Ranks that do not come are told from ranks that are slow: named after `patience`, and after twice that, ended.

A rank that is stopped, or loops, or has left, hangs all others: MPI waits for it without end. So each rank has a
thread (`watch.py`) that looks, a few times in `patience`, whether its world is in an operation and for how long. If it
has been for longer than `patience`, the thread asks all other ranks where they are, by datagrams (`asking.py`): it
needs Python's lock for moments, and MPI not at all.

* Who is in the operation, or waits for XLA's compiler, is well.
* Who is elsewhere, or does not answer, while it has been waited for `patience`, is *stuck*, and is named: once.
* Who still is after twice `patience` is killed by a rank of its host, where its loss is survived; else the job ends.
* Who has left, or is not there any more, is not waited for at all.

How long a rank is waited for is the longest that any rank has waited in this operation, and counts anew from when it
was last seen compiling. Of ranks that wait, whose patience ends first asks, and the others leave it to that one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from adaptive import CollectiveError, DisagreementError
from adaptive.extend import brief, real

from .asking import Asking, Peer
from .datagrams import Datagrams
from .stacks import ProcessId, this_process
from .watch import Watch, Watched

SECONDS = 60.0  # by default
_SHOWN = 8


def checked(patience: Any) -> float:
    """Seconds of patience; 0 for none of this.

    Raises:
      CollectiveError: it is no number of seconds.
    """
    seconds = real(patience)
    if seconds is None or not isfinite(seconds) or seconds < 0:
        raise CollectiveError(
            f"patience={brief(patience)}: write seconds, how long a rank may keep the others waiting before it is "
            f"taken for stuck ({SECONDS:g} by default), or 0 to wait for ever."
        )
    return seconds


def introduce(number: int, group: int, patience: float) -> tuple[Peer, Datagrams | None]:
    """What a rank tells all others of itself, and the socket by which they reach it.

    Args:
      number: its rank.
      group: the same for all ranks of its host: the least of their numbers.
    """
    if not patience:
        return Peer(number, group, ProcessId("", os.getpid(), 0.0, "", -1), (), b"", patience), None
    datagrams = Datagrams()
    key = secrets.token_bytes(32)
    return Peer(number, group, this_process(), tuple(datagrams.addresses), key, patience), datagrams


def watch(
    world: Watched, peers: Sequence[Peer], own: int, datagrams: Datagrams | None, abort: Callable[[int], object]
) -> Watch | None:
    """Start to watch over a world of these ranks; `None` where there are no others, or patience has no end.

    Args:
      abort: ends all processes of the job with a status, from any thread.

    Raises:
      DisagreementError: patience is not the same on all ranks. On every rank.
    """
    if len({peer.patience for peer in peers}) > 1:
        said = ", ".join(f"rank {peer.number}: {peer.patience:g}" for peer in peers[:_SHOWN])
        rest = ", …" if len(peers) > _SHOWN else ""
        if datagrams is not None:
            datagrams.close()
        raise DisagreementError(f"patience= is not the same on all ranks: {said}{rest}")
    if datagrams is None:
        return None
    if len(peers) == 1:
        datagrams.close()
        return None
    return Watch(world, Asking(peers, own, datagrams), peers[own].patience, abort)
