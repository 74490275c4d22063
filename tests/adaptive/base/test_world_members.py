"""Losses, as messages name them."""

from __future__ import annotations

import pytest

from adaptive.base.world_members import Loss


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
