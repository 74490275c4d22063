"""A worker's latest publication: whether it is complete, and can be copied."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.worlds.mailboxes.seqlock import SlotLayout

LAYOUT = SlotLayout([8, 100])


class Interrupted(Exception):
    """The writer has died."""


class Place:
    """A worker's place in memory."""

    def __init__(self):
        self.bytes = np.zeros(LAYOUT.place, np.uint8)

    def publish(self, round: int, *, interrupted: bool = False) -> None:
        fences = []

        def fence():
            fences.append(None)
            if interrupted and len(fences) == 2:  # the content is written, and not yet marked as complete
                raise Interrupted

        LAYOUT.write(self.bytes, round, [np.full(8, round, np.uint8), np.full(100, round, np.uint8)], fence)

    def copy(self, start: int, room: np.ndarray) -> None:
        room[:] = self.bytes[start : start + room.size]

    def read(self, round: int) -> set[int] | None:
        room = np.empty(LAYOUT.slot, np.uint8)
        found = LAYOUT.copy_latest(self.copy, 0, round, room)
        return {int(v) for vector in LAYOUT.vectors(room) for v in vector} if found else None


def test_the_latest_round_can_be_read():
    place = Place()
    assert place.read(0) is None
    for round in (1, 2, 3):
        place.publish(round)
    assert [place.read(round) for round in (1, 2, 3)] == [None, None, {3}]


def test_a_reader_gets_the_previous_value_during_a_write():
    place = Place()
    place.publish(1)
    place.publish(2)
    with pytest.raises(Interrupted):
        place.publish(3, interrupted=True)
    assert [place.read(round) for round in (1, 2, 3)] == [None, {2}, None]
    place.publish(4)
    assert [place.read(round) for round in (2, 4)] == [None, {4}]


@pytest.mark.parametrize(
    ("before", "meanwhile", "found", "torn"),
    [
        (0, [0, 0, 0], 0, 0),
        (1, [0, 0, 0], 1, 0),
        (2, [1, 0, 0], 2, 0),  # to the other slot
        (2, [2, 0, 0], 4, 1),
        (2, [2, 3, 0], 7, 2),
        (2, [2, 2, 2], 0, 3),
    ],
)
def test_the_latest_value_is_copied_again_if_it_was_overwritten(before, meanwhile, found, torn):
    place, layout = Place(), SlotLayout([8, 100])
    for _ in range(before):
        place.publish(5)
    more = iter(meanwhile)

    def slow(start, room):
        place.copy(start, room)
        for _ in range(next(more) if room.size == layout.slot else 0):
            place.publish(5)

    assert layout.copy_latest(slow, 0, 5, np.empty(layout.slot, np.uint8)) == found
    assert layout.torn == torn
    assert layout.copy_latest(place.copy, 0, 6, np.empty(layout.slot, np.uint8)) == 0
