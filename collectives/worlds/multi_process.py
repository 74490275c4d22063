"""Base class of worlds of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import WorldBase, forward
from .mailboxes.mailbox import CreateMailbox, ProcessMailbox
from .transport.operations import CLOSE, Operation
from .transport.process_group import Process
from .transport.transport import Transport
from .watchdog import LONGEST, Watchdog, check_hang_timeout


class MultiProcessWorld(WorldBase):
    """A world of several processes: a transport that runs its operations, a watchdog, and mailboxes.

    Args:
      hang_timeout: see `world`; None: a time that depends on what a rank does (`launchers/hangs.py`).

    Attributes:
      hang_timeout: the longest such time, in seconds.
      everyone: the processes that communicate, by rank.

    Raises:
      CollectiveError: `hang_timeout` is not a number of seconds.
    """

    transport: Transport
    everyone: tuple[Process, ...]

    def __init__(self, hang_timeout: float | None):
        super().__init__()
        self._hang_timeout = check_hang_timeout(hang_timeout)
        self.hang_timeout = LONGEST if self._hang_timeout is None else self._hang_timeout
        self._mailboxes: list[ProcessMailbox] = []

    rank: int = forward("transport.rank")
    processes: int = forward("transport.processes")
    waited: float = forward("transport.waited")
    watchdog: Watchdog | None = forward("transport.watchdog")

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Return every process's `value`, by rank: see `World.all_gather_bytes`."""
        return self.transport.all_gather_bytes(value, about, more)

    def barrier(self) -> None:
        """Return once every process has called it."""
        self.transport.barrier()

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError, in their current or next operation."""
        self.transport.report_failure(why)

    def why_no_mailbox(self) -> str:
        """Return "": there are mailboxes."""
        return ""

    def create_mailbox(self, nbytes: Sequence[int], about: str, instead_of: Any = None) -> ProcessMailbox:
        """Create a mailbox: see `World`."""
        creation = CreateMailbox(about, nbytes, lambda: self.everyone)
        self.transport.run(creation)
        if instead_of is not None:
            instead_of.stop()
            self._mailboxes.remove(instead_of)
        self._mailboxes.append(creation.result)
        return creation.result

    def close(self) -> None:
        """Close the world on all processes. Called by all of them at the end of their `with` blocks.

        Raises:
          DisagreementError: another process is not at the end of its block. On every process.
        """
        if self.lifetime.closed:
            return
        try:
            self._close_together()
        finally:
            super().close()
            self._stop()

    def _close_together(self) -> None:
        self.transport.run(Operation("the end of its world's block", self.lifetime.exit_reason, CLOSE, is_final=True))

    def _abandon(self, why: str) -> None:
        super()._abandon(why)
        self._stop(why)

    def _stop(self, why: str = "") -> None:
        """Stop the threads of the mailboxes and of the watchdog."""
        for mailbox in self._mailboxes:
            mailbox.stop()
        if self.watchdog is not None:
            self.watchdog.close(why)
