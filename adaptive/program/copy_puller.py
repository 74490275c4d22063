"""A thread that fetches other hosts' copies into this process's memory, while the program computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from adaptive.base.mailbox import CopyMailbox, Vectors

_PERIOD = 0.02  # seconds between two looks
_KEPT = 2  # copies per worker: of the last one, some workers' parts may be missing
NO_SERIAL = -1  # there is no copy; published by a worker that ends its copies


class CopyPuller:
    """Fetches the copies of workers on other hosts.

    Args:
      index: mailbox of the serial number of each worker's latest copy.
      mailboxes: the mailboxes to fetch from, by name. A worker need not publish in all of them.
      reader: a worker slot of this process.
      wanted: returns the worker slots to fetch from, with the names of the mailboxes. Called in the thread.
    """

    def __init__(
        self,
        index: CopyMailbox,
        mailboxes: Mapping[str, CopyMailbox],
        reader: int,
        wanted: Callable[[], Mapping[int, Sequence[str]]],
    ):
        self._index, self._mailboxes, self._reader, self._wanted = index, mailboxes, reader, wanted
        self._held: dict[tuple[str, int], dict[int, Vectors]] = {}
        self._seen: dict[int, int] = {}  # the latest serial number of each worker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adaptive-copies", daemon=True)
        self._thread.start()

    def serials(self, name: str, slot: int) -> list[int]:
        """Return the serial numbers of the complete copies of a worker that are here, newest first."""
        return sorted(self._held.get((name, slot), {}), reverse=True)

    def copy_of(self, name: str, slot: int, serial: int) -> Vectors | None:
        """Return a copy of a worker, or `None`. Must not be changed."""
        return self._held.get((name, slot), {}).get(serial)

    def latest(self, slot: int) -> int | None:
        """Return the serial number that a worker has published last; `None` if none is known."""
        return self._seen.get(slot)

    def close(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_PERIOD):
            for slot, names in self._wanted().items():
                found = self._index.look(slot, self._reader, 0)
                if found is not None and (serial := int(found[0].view(np.int64)[0])) != self._seen.get(slot):
                    self._fetch(slot, names, serial)

    def _fetch(self, slot: int, names: Sequence[str], serial: int) -> None:
        for name in names:
            found = self._mailboxes[name].look(slot, self._reader, serial)
            if found is not None:
                before = self._held.get((name, slot), {})
                kept = sorted(before, reverse=True)[: _KEPT - 1]
                copy = {serial: [np.array(vector) for vector in found]}
                self._held[name, slot] = {**{old: before[old] for old in kept}, **copy}  # at once, for other threads
        self._seen[slot] = serial
