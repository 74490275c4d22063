"""Memory that the processes of a host share, and a worker's latest publication in it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from collectives.worlds.mailboxes import shared_memory
from collectives.worlds.mailboxes.shared_memory import FileAddress, SharedFile, SlotLayout, open_shared


class Place:
    """The place of worker 1 of a process."""

    def __init__(self):
        self.layout = SlotLayout([8, 100])
        self.memory = np.zeros(2 * self.layout.place, np.uint8)

    def publish(self, round: int, value: int = 0) -> None:
        self.layout.write(self.memory, 1, round, [np.full(n, value or round, np.uint8) for n in (8, 100)])

    def read(self, round: int) -> set[int] | None:
        room = np.empty(self.layout.slot, np.uint8)
        found = self.layout.copy_latest(self.memory, 1, round, room)
        return {int(v) for vector in self.layout.vectors(room) for v in vector} if found else None


def test_the_latest_round_can_be_read():
    place = Place()
    assert place.read(0) is None
    for round in (1, 2, 3):
        place.publish(round)
    assert [place.read(round) for round in (1, 2, 3)] == [None, None, {3}]


def test_a_reader_gets_the_previous_value_during_a_write(monkeypatch):
    """The writer may die there."""
    place, fences = Place(), []
    place.publish(1)
    place.publish(2)

    def fence():
        fences.append(None)
        if len(fences) == 2:  # the content is written, and not yet marked as complete
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(shared_memory, "_fence", fence)
        with pytest.raises(KeyboardInterrupt):
            place.publish(3)
    assert [place.read(round) for round in (1, 2, 3)] == [None, {2}, None]
    place.publish(4)
    assert [place.read(round) for round in (2, 4)] == [None, {4}]


@pytest.mark.parametrize(
    ("before", "meanwhile", "found"),
    [
        (1, [0], {1}),
        (2, [1], {2}),  # to the other slot
        (2, [2, 0], {4}),
        (2, [2, 3, 0], {7}),
        (2, [2, 2, 2], None),
    ],
)
def test_the_latest_value_is_copied_again_if_it_was_overwritten(before, meanwhile, found, monkeypatch):
    place, values, more, fence = Place(), iter(range(1, 99)), iter(meanwhile), shared_memory._fence

    def publish(times):
        for _ in range(times):
            place.publish(5, next(values))

    def before_and_after_a_copy():
        monkeypatch.setattr(shared_memory, "_fence", fence)
        publish(next(more))
        monkeypatch.setattr(shared_memory, "_fence", after_a_copy)

    def after_a_copy():
        monkeypatch.setattr(shared_memory, "_fence", before_and_after_a_copy)

    publish(before)
    monkeypatch.setattr(shared_memory, "_fence", before_and_after_a_copy)
    assert place.read(5) == found
    assert next(more, None) is None


def test_a_shared_file_is_written_by_its_owner_alone():
    file = SharedFile(100)
    read = open_shared(file.address)
    file.memory[:] = 5
    file.memory[7] = 6
    assert read.tolist() == file.memory.tolist() == [5] * 7 + [6] + [5] * 92
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1
    for _ in range(2):
        file.close()
    with pytest.raises(OSError, match=file.address.path):
        open_shared(file.address)
    assert read[7] == 6


def test_files_of_other_processes_are_checked_by_their_header(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "other").write_bytes(bytes(1000))
    (tmp_path / "short").write_bytes(b"")
    for path in (f"{tmp_path}/fifo", f"{tmp_path}/other", f"{tmp_path}/short", "/nowhere"):
        with pytest.raises((OSError, ValueError), match=path):
            open_shared(FileAddress(path, b"a token"))
