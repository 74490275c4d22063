"""Workers of this process alone, in turn on one device: where a program runs when it is given no world.

With one worker it is what `collectives.SoloWorld` is; with several it stands in for a cluster, in checks and in tests.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial, reduce

import jax
import numpy as np

from adaptive.base.board import LocalBoards
from adaptive.base.seats import Seats
from adaptive.base.world import Arrived, Blocking, LookAtPiece, Parts

from .message import accumulate


class LocalWorld(Blocking, LocalBoards, Seats):
    """Some workers, one after another on one device. They may `leave` and `join` between two steps.

    Args:
      seats: how many there can be.
      device: JAX's default device if not given.
      workers: how many there are at first; the rest are in reserve. By default all.
    """

    rank, processes = 0, 1

    def __init__(self, seats: int = 1, device: jax.Device | None = None, *, workers: int | None = None):
        super().__init__(seats, workers)
        self.size = seats
        self.workers = range(seats)
        self.devices = (device or jax.local_devices()[0],) * seats

    def exchange(
        self,
        parts: Sequence[Parts],
        ops: Sequence[str],
        status: np.ndarray,
        channel: Hashable = 0,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
    ) -> Arrived:
        reduced = reduce(partial(accumulate, ops), parts)
        return [list(reduced) for _ in parts], status

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        return [value]

    def barrier(self) -> None:
        return None

    def fail(self, why: str) -> None:
        return None
