"""What all worlds share: entering one makes it the world of eager collectives, leaving it closes it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Token
from types import TracebackType
from typing import Self

import jax

from adaptive._eager import current_world
from adaptive._errors import CollectiveError
from adaptive._where import at, current_line
from adaptive._world import World


class Scope:
    """A world as a context manager. Worlds nest: inside, collectives go to the world that was entered last."""

    def __init__(self) -> None:
        self._tokens: list[Token[World | None]] = []
        self._closed = False

    def __enter__(self) -> Self:
        self._check_open()
        self._tokens.append(current_world.set(self))  # type: ignore[arg-type]  # the subclasses are Worlds
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_world.reset(self._tokens.pop())
        # A process that fails must not wait for others, who may be in an exchange: closing can be collective.
        if kind is None and not self._tokens:
            self.close()

    def close(self) -> None:
        """Give back what the world holds. Leaving its `with` block does so; closing twice is harmless."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise CollectiveError(
                f"{self!r} is closed, and is used again{at(current_line())}. Keep what uses a world inside its block:\n"
                "    with comm.world() as world:\n"
                "        program = ad.Program(..., world=world)"
            )


def describe(devices: Sequence[jax.Device]) -> str:
    """`cpu:0`, `cpu:0, cpu:1`, `cuda:0 … cuda:7`."""
    names = [str(device) for device in devices]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"
