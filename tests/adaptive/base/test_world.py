"""What worlds say of losses, and exchanges that are repeated after one."""

from __future__ import annotations

import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.world import Loss


@pytest.mark.parametrize(
    ("workers", "seconds", "text"),
    [
        ((2,), 0.0, "worker 2 lost: rank 2 disconnected in message 1."),
        ((2, 3), 0.0123, "workers 2, 3 lost: rank 2 disconnected in message 1; 12 ms to repair."),
        ((2,), 0.00321, "worker 2 lost: rank 2 disconnected in message 1; 3.2 ms to repair."),
    ],
)
def test_a_loss_names_workers_process_and_host(workers, seconds, text):
    assert str(Loss(workers, "rank 2", "message 1", seconds)) == text


@pytest.mark.parametrize(("workers", "leaving"), [(2, ()), (1, (0,))])
def test_members_of_a_fixed_world_neither_join_nor_leave(workers, leaving):
    world = comm.SoloWorld()
    world.change(1)  # as many as there are
    with pytest.raises(ad.WorkerCountError, match="neither join nor leave"):
        world.change(workers, leaving)
