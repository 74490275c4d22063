"""What is said of a lost process."""

from __future__ import annotations

import pytest

from adaptive.base.world_members import Loss


@pytest.mark.parametrize(
    ("seconds", "repaired"),
    [(0.038, "; 38 ms to repair."), (0.0004, "; 0.4 ms to repair."), (0.0, ".")],
)
def test_the_time_of_a_repair_is_no_zero(seconds, repaired):
    text = str(Loss((1, 2), "rank 1 (pid 7 on node)", "message 1 of step 14", seconds))
    assert text == f"workers 1, 2 lost: rank 1 (pid 7 on node) disconnected in message 1 of step 14{repaired}"
