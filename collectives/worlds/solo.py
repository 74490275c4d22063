"""A world of one worker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import numpy as np

from adaptive.extend import Arrived, Blocking, LocalBoards, LookAtPiece, Parts, Reduction

from .scope import Scope, describe


class SoloWorld(Blocking, LocalBoards, Scope):
    """One process, one worker: what an exchange would reduce is reduced already.

    Args:
      device: where the worker computes; JAX's first by default.
    """

    capacity = 1
    rank = 0
    processes = 1
    workers = range(1)

    def __init__(self, device: jax.Device | None = None):
        super().__init__()
        self.devices: Sequence[jax.Device] = (jax.local_devices()[0] if device is None else device,)

    def exchange(
        self,
        parts: Sequence[Parts],
        ops: Sequence[Reduction],
        status: np.ndarray,
        channel: Hashable = 0,
        about: str = "",
        more: str = "",
        look: LookAtPiece | None = None,
        step: int = 0,
    ) -> Arrived:
        """The parts and the status, as given: the protocol of `World`."""
        self._check_open()
        return [list(parts[0])], status

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """The only process's value."""
        self._check_open()
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""
        self._check_open()

    def __repr__(self) -> str:
        return f"SoloWorld(1 worker on {describe(self.devices)})"
