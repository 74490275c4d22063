"""Jobs with a random fault in a random phase: they end as they must, with what one worker brings.

`python -m tests.mpi.random_faults --jobs 200` runs more of them.
"""

from __future__ import annotations

import pytest

from tests.mpirun import survives_losses
from tests.speed import limit

from . import random_faults

pytestmark = [pytest.mark.ranks, pytest.mark.long, survives_losses]


@pytest.mark.parametrize("seed", [6, 13, 24, 45])
def test_random_faults_in_random_phases(seed):
    """Two killed while the program is built, one that leaves, all signaled in a restore, and two stopped."""
    fault = random_faults.draw(seed)
    wrong, output = random_faults.run(fault, limit(60))
    assert wrong in ([], [random_faults.NOT_REACHED]), f"{fault}: {wrong}\n{output}"
