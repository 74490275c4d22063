"""Programs on three ranks that take sources of the catalogue, one program after the other; see test_on_ranks.py.

`adaptive run -n 3 on_ranks.py walk "grain: data" …`: one worker leaves and comes back in mid-epoch, and a restored
program repeats what the first one did. `adaptive run -n 3 on_ranks.py kill "grain: data" …`, for one or two sources: a
rank kills itself in mid-epoch.
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
                program.rescale(workers=2)
            if report.step == 3:
                assert report.members == (0, 1), report
                program.rescale(workers=3)
            while report.step == 4 and world.rank == 0 and not world.poll_ready():
                time.sleep(0.001)
        assert report.members == (0, 1, 2), report
        kept = program.checkpoint()
        for report in program.run(steps=STEPS - KEPT):
            seen[report.step] = check(row, program, report)
    restored(group, row, kept, seen)


def walk_alone(group: Group, row: Row) -> None:
    """The same with an iterator per worker: no resizes, and each worker has its own epochs."""
    seen = {}
    with program_of(row, group.build(row), global_batch=6) as program:
        for report in program.run(steps=KEPT):
            seen[report.step] = check(row, program, report, once=report.examples % row.length == 0)
        kept = program.checkpoint()
        for report in program.run(steps=STEPS - KEPT):
            seen[report.step] = check(row, program, report, once=False)
    restored(group, row, kept, seen, global_batch=6)


def restored(group: Group, row: Row, kept: ad.Checkpoint, seen: dict[int, list[int]], **options: int) -> None:
    """A new program with a new source takes what the first one took after the checkpoint."""
    with program_of(row, group.build(row), **options) as program:
        program.restore(kept)
        for report in program.run(steps=STEPS - KEPT):
            assert check(row, program, report, once=not options) == seen[report.step], (report, seen)


def kill(group: Group, row: Row, world: ad.World, victim: int) -> None:
    """One rank kills itself in mid-epoch; the others take each example once, those of the interrupted step again.

    Where each worker has an iterator of its own, the rest of the lost worker's examples is lost with it.
    """
    with program_of(row, group.build(row)) as program:
        lost: list[ad.Loss] = []
        for report in program.run(steps=STEPS):
            check(row, program, report, once=not row.per_worker)
            lost += report.lost
            if report.step == 2 and world.workers[0] == victim:
                os.kill(os.getpid(), signal.SIGKILL)
        assert lost[-1].workers == (victim,), lost  # the first report tells of those lost to earlier programs, too
        assert victim not in report.members, report


def main() -> None:
    what, *names = sys.argv[1:]
    victims = iter([2, 1])
    rows = {name(group, row): (group, row) for group in GROUPS for row in group.rows}
    with comm.world() as world:
        own = world.workers[0]
        for group, row in map(rows.__getitem__, names):
            began = time.monotonic()
            try:
                if what == "kill":
                    kill(group, row, world, next(victims))
                elif row.per_worker:
                    walk_alone(group, row)
                else:
                    walk(group, row, world)
            except Exception:
                traceback.print_exc()
                os._exit(3)  # a rank that is alone in its error must not wait for the others
            print(f"rank {own}: {what} {name(group, row)} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"rank {own} ended well", flush=True)


if __name__ == "__main__":
    main()
