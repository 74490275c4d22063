"""A worker's last two publications: which are complete, and can be copied."""

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

    def rounds(self) -> list[int]:
        return LAYOUT.rounds(self.copy, 0)

    def read(self, round: int) -> set[int] | None:
        room = np.empty(LAYOUT.slot, np.uint8)
        found = LAYOUT.copy_round(self.copy, 0, round, room)
        return {int(v) for vector in LAYOUT.vectors(room) for v in vector} if found else None


def test_the_last_two_rounds_can_be_read():
    place = Place()
    assert place.rounds() == []
    assert place.read(0) is None
    for round in (1, 2, 3):
        place.publish(round)
    assert place.rounds() == [3, 2]
    assert [place.read(round) for round in (1, 2, 3)] == [None, {2}, {3}]


def test_a_reader_gets_the_previous_value_during_a_write():
    place = Place()
    place.publish(1)
    place.publish(2)
    with pytest.raises(Interrupted):
        place.publish(3, interrupted=True)
    assert place.rounds() == [2]
    assert [place.read(round) for round in (1, 2, 3)] == [None, {2}, None]
    place.publish(4)
    assert place.rounds() == [4, 2]


def test_a_copy_during_which_it_was_overwritten_is_not_used():
    place = Place()
    place.publish(1)
    place.publish(2)
    torn = LAYOUT.torn

    def slow(start, room):
        place.copy(start, room)
        if room.size == LAYOUT.slot:
            place.publish(3)

    assert not LAYOUT.copy_round(slow, 0, 1, np.empty(LAYOUT.slot, np.uint8))
    assert LAYOUT.torn == torn + 1


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


@pytest.mark.parametrize(("meanwhile", "found", "torn"), [([1], True, 0), ([2], False, 1), ([0], True, 0)])
def test_a_round_is_copied_as_long_as_it_is_there(meanwhile, found, torn):
    place, layout = Place(), SlotLayout([8, 100])
    for round in (4, 5):
        place.publish(round)
    more = iter(meanwhile)

    def slow(start, room):
        place.copy(start, room)
        for _ in range(next(more) if room.size == layout.slot else 0):
            place.publish(6)

    assert layout.copy_round(slow, 0, 5, np.empty(layout.slot, np.uint8)) is found
    assert layout.torn == torn
    numbers = [layout.number(place.copy, 0, round) for round in (5, 6)]
    assert numbers == ([0, 2 + meanwhile[0]] if meanwhile[0] else [2, 0])
