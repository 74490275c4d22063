"""Programs on ranks that take sources of the catalogue, one program after the other; see test_on_ranks.py.

`adaptive run -n 2 on_ranks.py "grain: data" … kill "torch: Dataset()" …`: the last worker leaves and comes back in
mid-epoch, and a restored program repeats what the first one did. With the sources after `kill`, of which there is one
less than ranks, the last rank kills itself in mid-epoch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

import adaptive as ad
import collectives as comm
from tests.sources.catalogue import GROUPS
from tests.sources.checks import check, program_of
from tests.sources.rows import Group, Row, name

STEPS, KEPT = 11, 8  # two epochs and a part of the third; the checkpoint is in mid-epoch


def walk(group: Group, row: Row, world: ad.World) -> None:
    """Resize in mid-epoch, continue past the end of two epochs, restore."""
    seen = {}
    with program_of(row, group.build(row)) as program:
        for report in program.run(steps=KEPT):
            seen[report.step] = check(row, program, report)
            if report.step == 1:
                program.rescale(workers=world.capacity - 1)
            if report.step == 3:
                assert report.members == tuple(range(world.capacity - 1)), report
                program.rescale(workers=world.capacity)
            while report.step == 4 and world.rank == 0 and report.members != tuple(range(world.capacity)):
                if world.poll_ready():
                    break
                time.sleep(0.001)
        assert report.members == tuple(range(world.capacity)), report
        kept = program.checkpoint()
        for report in program.run(steps=STEPS - KEPT):
            seen[report.step] = check(row, program, report)
    with program_of(row, group.build(row)) as program:
        program.restore(kept)
        for report in program.run(steps=STEPS - KEPT):
            assert check(row, program, report) == seen[report.step], (report, seen)


def kill(group: Group, row: Row, world: ad.World, victim: int) -> None:
    """One rank kills itself in mid-epoch; the others take each example once, those of the interrupted step again."""
    with program_of(row, group.build(row)) as program:
        lost: list[ad.Loss] = []
        for report in program.run(steps=STEPS):
            check(row, program, report)
            lost += report.lost
            if report.step == 2 and world.workers[0] == victim:
                os.kill(os.getpid(), signal.SIGKILL)
        assert lost[-1].workers == (victim,), lost  # the first report tells of those lost to earlier programs, too
        assert victim not in report.members, report


def main() -> None:
    at = sys.argv.index("kill")
    rows = {name(group, row): (group, row) for group in GROUPS for row in group.rows}
    with comm.world() as world:
        own = world.workers[0]
        try:
            for source in sys.argv[1:at]:
                walk(*rows[source], world)
            for victim, source in zip(range(world.capacity - 1, 0, -1), sys.argv[at + 1 :], strict=True):
                kill(*rows[source], world, victim)
        except Exception:
            traceback.print_exc()
            os._exit(3)  # a rank that is alone in its error must not wait for the others
    print(f"rank {own} ended well", flush=True)


if __name__ == "__main__":
    main()
