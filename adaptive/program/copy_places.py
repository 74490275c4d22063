"""The memory for copies of a run's state: a place for each process that took part in creating it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from adaptive.base.mailbox import CopyMailbox, Vectors

from .copy_puller import NO_SERIAL, CopyPuller


class CopyPlaces:
    """Mailboxes of copies, and an index of the latest copy of each worker.

    Args:
      mailboxes: by name.
      index: the mailbox of serial numbers.
      reader: a worker slot of this process.
      wanted: returns the worker slots of other hosts to fetch copies from, and the names of these. Called in a thread.

    Attributes:
      slots: the worker slots that have a place. Replicated.
      hosts: the host of each of these slots, as a number. Replicated.
    """

    def __init__(
        self,
        mailboxes: Mapping[str, CopyMailbox],
        index: CopyMailbox,
        reader: int,
        wanted: Callable[[CopyPlaces], Mapping[int, Sequence[str]]],
    ):
        self._mailboxes, self._index = dict(mailboxes), index
        self.hosts = index.hosts
        self.slots = tuple(self.hosts)
        several = len(set(self.hosts.values())) > 1
        self._puller = CopyPuller(index, mailboxes, reader, lambda: wanted(self)) if several else None

    @property
    def names(self) -> list[str]:
        """The names of the mailboxes."""
        return list(self._mailboxes)

    @property
    def elsewhere(self) -> list[int]:
        """The worker slots whose copies this process cannot read from memory."""
        return [slot for slot in self.slots if not self._index.is_mapped(slot)]

    def publish(self, name: str, slot: int, serial: int, vectors: Sequence[np.ndarray]) -> None:
        """Publish a copy of a worker of this process."""
        self._mailboxes[name].publish(slot, serial, vectors)

    def publish_index(self, slots: Iterable[int], serial: int) -> None:
        """Publish the serial number of the latest copy of workers of this process."""
        for slot in set(slots) & set(self.slots):
            self._index.publish(slot, 0, [np.array([serial]).view(np.uint8)])

    def serials(self, name: str, slot: int) -> list[int]:
        """Return the serial numbers of the complete copies of a worker that this process can read, newest first."""
        mailbox = self._mailboxes.get(name)
        if mailbox is None or slot not in self.slots:
            return []
        if mailbox.is_mapped(slot):
            return [serial for serial in mailbox.rounds(slot) if serial > 0]
        return [] if self._puller is None else self._puller.serials(name, slot)

    def copy_of(self, name: str, slot: int, serial: int) -> Vectors | None:
        """Return a worker's copy, or `None`."""
        mailbox = self._mailboxes[name]
        if mailbox.is_mapped(slot):
            return mailbox.copy_of(slot, serial)
        return None if self._puller is None else self._puller.copy_of(name, slot, serial)

    def has_ended(self, slot: int) -> bool:
        """Return whether a worker has ended its copies, or takes them elsewhere."""
        if not self._index.is_mapped(slot):
            return self._puller is not None and self._puller.latest(slot) == NO_SERIAL
        found = self._index.copy_of(slot, 0)
        return found is not None and int(found[0].view(np.int64)[0]) == NO_SERIAL

    def close(self) -> None:
        """Fetch no more copies. Those that are here can still be read."""
        if self._puller is not None:
            self._puller.close()
