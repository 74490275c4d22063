"""Copies of a run's state in the memory of other processes, so that it outlives the processes that computed it.

Every `every` steps each worker publishes its per-worker leaves, and the process with rank 0 the replicated state if any
process is in reserve: the members have it anyway. They are copied while the kernels of the next step run, which only
read the state. Processes of the same host map the memory, which exists until the last of them has ended. Processes of
other hosts fetch the copies (`copy_puller.py`): the partner on the next host, and every process in reserve.

Copies have serial numbers, the same on all workers, and each worker's last two are kept. A copy is used only if its
writer completed it, and a copy of the run only if the parts of all workers are there. If a process dies while it
writes, the copy before is complete.

When a spawned process joins, all processes of the job, those in reserve too, create new memory with a place for it at
the rendezvous. Those in reserve read the earlier copies until there is a new one.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptive.base.mailbox import CopyMailbox, OffersCopies, Vectors
from adaptive.base.roster import with_same_members
from adaptive.base.world import World
from adaptive.base.world_members import TransferPayload
from adaptive.runtime.worker_state import WorkerState

from .copy_places import CopyPlaces
from .copy_puller import NO_SERIAL

if TYPE_CHECKING:
    from .parts import ProgramParts

_HEAD = 16  # bytes: the step, and the length of the small part
_SMALL = 1 << 20  # most bytes of the small part
_REPLACED = 2  # the most memories that were replaced, and are still read
_FULL, _LOCAL = "full", "local"
_log = logging.getLogger("adaptive")


class MemoryCopies:
    """The copies of one program's runs. Every process has one; inactive until `open`.

    Args:
      one_data_set: whether all workers take their examples from one data set, so that a worker can continue another
        one's per-worker state.

    Attributes:
      active: whether copies are taken. Replicated.
      due: the copy that `take` completes: its serial number and step. `None` if there is none.
    """

    def __init__(self, world: World, workers: WorkerState, *, one_data_set: bool):
        self._world, self._workers, self._one_data_set = world, workers, one_data_set
        self.active = False
        self._every = 1
        # The memory that is in use, last, and before it what it replaced: that is read until the next copy is complete.
        self._places: list[CopyPlaces] = []
        self._serial = 0  # of the last copy. Replicated
        self._orphans: list[int] = []  # slots of workers that are gone, whose state nobody has continued. Replicated
        self._n_losses = 0  # of the world, that `_orphans` accounts for. Replicated
        self.due: tuple[int, int] | None = None
        self._found: tuple[int, bytes, list[np.ndarray]] | None = None  # what `newest` has found
        self._away: set[int] = set()  # slots whose workers are gone. Replicated
        self._given_up = False  # whether this process publishes no more

    # --- beginning and end --------------------------------------------------------------------------------------------

    def open(self, every: int, name: str) -> str:
        """Start to take copies, unless they are taken already. All processes call it before a run. Communicates.

        Args:
          every: steps between two copies.
          name: of the program.

        Returns:
          Why no copies are taken; "" if they are. Replicated.
        """
        world = self._world
        why = world.why_no_copies() if isinstance(world, OffersCopies) else "this world cannot lose a process"
        if why:
            return why
        self._every, self.due, self.active, self._given_up = every, None, True, False
        if not world.in_reserve:  # else this process was spawned: it has no place before it joins
            self._create(name)
            self._n_losses = len(world.losses)
        if isinstance(world, OffersCopies):
            world.hold_copies(self)
        return ""

    def close(self) -> None:
        """Stop taking copies. Those that were taken no longer count."""
        if self.active:
            self.active, self._found = False, None
            if isinstance(self._world, OffersCopies):
                self._world.hold_copies(None)
            self._end_places()

    def _end_places(self) -> None:
        """Tell others that no copies come any more, and drop the memory."""
        own = [self._world.workers[i] for i in self._workers.present]
        for places in self._places:
            places.publish_index(own, NO_SERIAL)
            places.close()
        self._places = []

    def _create(self, name: str) -> None:
        """Create the memory for the present processes. Communicates."""
        world = self._world
        assert isinstance(world, OffersCopies)
        offers = world
        self._end_places()
        self.create(lambda nbytes: offers.create_copies(nbytes, f"memory for copies of {name}"))

    def has_place(self) -> bool:
        """Return whether this process has a place for copies: the protocol of `HoldsCopies`."""
        return bool(self._places) and self._world.workers[0] in self._places[-1].slots

    def create(self, make: Callable[[Sequence[int]], CopyMailbox]) -> None:
        """Create memory with a place for each process that takes part: the protocol of `HoldsCopies`."""
        sizes = {_FULL: [_HEAD, _SMALL, *(array.nbytes for array in self._workers.views())]}
        if self._has_local:
            sizes[_LOCAL] = [_HEAD, *(array.nbytes for array in self._workers.local_views(0))]
        mailboxes = {key: make(nbytes) for key, nbytes in sizes.items()}
        for places in self._places:
            places.close()
        new = CopyPlaces(mailboxes, make([8]), self._world.workers[0], self._wanted)
        self._places = [*self._places[-_REPLACED:], new]

    def _use_new_places(self) -> None:
        """Publish in the memory that was created last, and drop what it replaced."""
        self._places, before = self._places[-1:], self._places[:-1]
        for places in before:
            places.publish_index([self._world.workers[i] for i in self._workers.present], NO_SERIAL)

    def _wanted(self, places: CopyPlaces) -> dict[int, list[str]]:
        """Return the worker slots of other hosts that this process fetches copies of, and which copies."""
        world, others = self._world, places.elsewhere
        if world.in_reserve:
            return dict.fromkeys(others, places.names)
        if not self._has_local:
            return {}
        members = [slot for slot in world.members if slot in places.slots]
        partner = partners({slot: places.hosts[slot] for slot in members})
        return {slot: [_LOCAL] for slot in others if partner.get(slot) in world.workers}

    # --- taking copies ------------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
        """Begin a copy if one is due after this step; `take` completes it. All members call it."""
        if step % self._every == 0 and (self._has_reserve or self._has_local):
            self._serial += 1
            self.due = self._serial, step

    def take(self, parts: ProgramParts) -> None:
        """Take the copy that is due: publish this process's part. All members call it in the next step, while kernels
        run, before anything is exchanged.
        """
        due, self.due = self.due, None
        if due is None:
            return
        (serial, step), world, workers = due, self._world, self._workers
        small = self._small(parts)
        if self._given_up:
            return
        places = self._places[-1]
        try:
            if self._has_local:
                for i in workers.present:
                    vectors = [_head(step, 0), *map(_bytes, workers.local_views(i))]
                    places.publish(_LOCAL, world.workers[i], serial, vectors)
            if small:
                vectors = [_head(step, len(small)), np.frombuffer(small, np.uint8), *map(_bytes, workers.views())]
                places.publish(_FULL, world.workers[workers.some_present], serial, vectors)
            places.publish_index([world.workers[i] for i in workers.present], serial)
        except OSError as error:
            self._give_up(f"memory is short: {error.strerror or error}")

    def _small(self, parts: ProgramParts) -> bytes:
        """Return the small part of the run's state, on the process that publishes it; elsewhere b""."""
        if not self._has_reserve:
            return b""
        parts.hooks.catch_up(parts.sizes)  # on all members alike
        if parts.world.rank or self._given_up:
            return b""
        from .state_transfer import pack_small

        small = pickle.dumps(pack_small(parts, tuple(parts.progress)))
        if len(small) > _SMALL:
            self._give_up(f"the state of hooks and data takes {len(small)} bytes, more than {_SMALL}")
        return small

    def _give_up(self, why: str) -> None:
        self._given_up = True
        _log.warning("this process copies no more of its state to memory: %s.", why)

    @property
    def _has_local(self) -> bool:
        """Whether any state is per worker. Replicated."""
        return self._workers.has_local

    @property
    def _has_reserve(self) -> bool:
        """Whether any process with a place for copies is in reserve, as far as is known."""
        return bool(self._places) and bool(set(self._places[-1].slots) - set(self._world.members) - self._away)

    # --- copies that are here -----------------------------------------------------------------------------------------

    def _serials(self, name: str, slot: int) -> list[int]:
        """Return the serial numbers of the complete copies of a worker that this process can read, newest first."""
        return sorted({serial for places in self._places for serial in places.serials(name, slot)}, reverse=True)

    def _copy_of(self, name: str, slot: int, serial: int) -> Vectors | None:
        holders = (places for places in reversed(self._places) if serial in places.serials(name, slot))
        return next((found for places in holders if (found := places.copy_of(name, slot, serial)) is not None), None)

    def newest(self) -> int:
        """Return the serial number of the newest copy of the run that is complete here; -1 if there is none. Local."""
        self._found = None
        if not self._places or any(map(self._places[-1].has_ended, self._places[-1].slots)):
            return NO_SERIAL
        slots = {slot for places in self._places for slot in places.slots}
        pairs = {(serial, slot) for slot in slots for serial in self._serials(_FULL, slot)}
        for serial, slot in sorted(pairs, reverse=True):
            vectors = self._copy_of(_FULL, slot, serial)
            if vectors is None:
                continue
            small = vectors[1][: int(_numbers(vectors[0])[1])].tobytes()
            if self._has_parts_of(_members_in(small), serial):
                self._found = serial, small, list(vectors[2:])
                return serial
        return NO_SERIAL

    def _has_parts_of(self, members: Iterable[int], serial: int) -> bool:
        return not self._has_local or all(serial in self._serials(_LOCAL, slot) for slot in members)

    def load(self) -> TransferPayload:
        """Return the copy that `newest` found, in the form of `state_transfer.pack`.

        Raises:
          AssertionError: `newest` has found none.
        """
        assert self._found is not None
        (_serial, small, vectors), self._found = self._found, None
        like = self._workers.views()
        arrays = [vector.view(array.dtype).reshape(array.shape) for vector, array in zip(vectors, like, strict=True)]
        return pickle.loads(small), arrays

    # --- per-worker state of workers that are gone --------------------------------------------------------------------

    def gone(self, slots: Iterable[int]) -> None:
        """Record that these workers have left for good; lost ones are known from the world. Replicated."""
        slots = set(slots)
        self._orphans += sorted(slots - set(self._orphans))
        self._away |= slots

    def hand_over(self, joined: Sequence[int], name: str) -> list[str]:
        """Let workers that joined continue the per-worker state of workers that are gone. All members call it, after
        each change of members. Communicates if any joined.

        Returns:
          Notes.
        """
        losses = self._world.losses
        self.gone(slot for loss in losses[self._n_losses :] for slot in loss.workers)
        self._n_losses, notes = len(losses), []
        self._away -= set(joined)
        if joined and self._has_local and self._orphans:
            notes = self._give_to(heirs(joined, self._orphans, same_slot=not self._one_data_set), name)
        self._serial += 1  # lost workers may have begun the next copy
        self._use_new_places()
        return notes

    def _give_to(self, heir_of: Mapping[int, int], name: str) -> list[str]:
        about = f"per-worker state of {name} for workers that joined"
        found = with_same_members(self._world, lambda: self._gather(sorted(heir_of), about))
        notes = []
        for orphan, heir in heir_of.items():
            if orphan not in found:
                continue
            self._orphans.remove(orphan)
            step, vectors = found[orphan]
            if heir in self._world.workers:
                self._workers.adopt_local(self._world.workers.index(heir), vectors)
            notes.append(f"worker {heir} continues the per-worker state of worker {orphan} after step {step}.")
        return notes

    def _gather(self, orphans: Sequence[int], about: str) -> dict[int, tuple[int, Vectors]]:
        """Return the newest copies of these workers: their steps and leaves. Communicates."""
        mine = {orphan: (self._local_serials(orphan) or [NO_SERIAL])[0] for orphan in orphans}
        everyone = [json.loads(said) for said in self._world.all_gather_bytes(json.dumps(mine).encode(), about)]
        sent = {}
        for orphan in orphans:
            newest = max(range(len(everyone)), key=lambda rank: everyone[rank][str(orphan)])
            if newest == self._world.rank and mine[orphan] != NO_SERIAL:
                sent[orphan] = self._copy_of(_LOCAL, orphan, mine[orphan])
        received = [pickle.loads(said) for said in self._world.all_gather_bytes(pickle.dumps(sent), about)]
        copies = {slot: vectors for of_one in received for slot, vectors in of_one.items() if vectors is not None}
        return {slot: (int(_numbers(vectors[0])[0]), vectors[1:]) for slot, vectors in copies.items()}

    def _local_serials(self, slot: int) -> list[int]:
        return [serial for serial in self._serials(_LOCAL, slot) if serial <= self._serial]

    # --- for joining processes ----------------------------------------------------------------------------------------

    def export(self) -> tuple[Any, ...]:
        """Return the replicated part, for `adopt` on a joining process."""
        return self._serial, self._orphans, self._n_losses, self._away

    def adopt(self, exported: tuple[Any, ...]) -> None:
        """Replace the replicated part by what another process has exported."""
        self._serial, self._orphans, self._n_losses, self._away = exported


def partners(hosts: Mapping[int, int]) -> dict[int, int]:
    """Return for each worker slot the one whose process keeps its copy: the slot beside it on the next host.

    Args:
      hosts: the host of each worker slot.
    """
    on = {host: [slot for slot in hosts if hosts[slot] == host] for host in sorted(set(hosts.values()))}
    names = list(on)
    partner: dict[int, int] = {}
    for number, host in enumerate(names):
        following = on[names[(number + 1) % len(names)]]
        partner |= {slot: following[i % len(following)] for i, slot in enumerate(on[host])}
    return partner


def heirs(joined: Sequence[int], orphans: Sequence[int], *, same_slot: bool) -> dict[int, int]:
    """Return which joined worker continues the state of which orphan, by orphan: the worker in its own slot if one
    joined there, else any other.

    Args:
      same_slot: whether only the worker in the same slot may.
    """
    found = {slot: slot for slot in joined if slot in orphans}
    if not same_slot:
        rest = (orphan for orphan in orphans if orphan not in found)
        free = [slot for slot in joined if slot not in found]
        found |= dict(zip(rest, free, strict=False))
    return found


def _members_in(small: bytes) -> list[int]:
    from .state_transfer import members_in

    return members_in(pickle.loads(small))


def _head(step: int, length: int) -> np.ndarray:
    return np.array([step, length], np.int64).view(np.uint8)


def _numbers(head: np.ndarray) -> np.ndarray:
    return np.array(head).view(np.int64)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
