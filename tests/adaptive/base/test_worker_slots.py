from __future__ import annotations

import pytest

from adaptive.base.worker_slots import WorkerSlots


def test_workers_leave_until_one_remains_and_join_in_empty_slots():
    slots = WorkerSlots(3, 2)
    slots.leave(0)
    assert slots.members == (1,)
    for slot, why in ((1, "is the last one"), (0, "is already empty"), (3, "there is no worker slot 3")):
        with pytest.raises(ValueError, match=why):
            slots.leave(slot)
    slots.join(2)
    assert slots.members == (1, 2)
    assert slots.joined_in_generation == (0, slots.generation)
    with pytest.raises(ValueError, match="worker slot 2 is occupied"):
        slots.join(2)
    slots.join(0)
    assert slots.members == (0, 1, 2)
