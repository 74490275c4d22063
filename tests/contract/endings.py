"""Jobs whose ranks die, hang, come, or are ended: `adaptive run -n N endings.py CASE FOLDER`; see test_ranks.py.

What is left in the end is compared with one worker on the same examples.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
from tests.contract.problem import COUNTED, DATA, check_counted, descend_and_count  # noqa: E402
from tests.speed import at_start, limit  # noqa: E402

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 30


def signal_myself(number: int) -> None:
    os.kill(os.getpid(), number)


def dies() -> None:
    """Rank 0 is killed while it computes a gradient, and rank 2 in a hook."""
    with comm.world() as world:
        own, computed = world.rank, []

        def computing(y):
            computed.append(1)
            if own == 0 and len(computed) == 6:
                signal_myself(signal.SIGKILL)
            return np.asarray(y)

        def in_hook(control):
            if own == 2 and control.step == 20:
                signal_myself(signal.SIGKILL)

        def driver(state, batch):
            y = jax.pure_callback(computing, jax.ShapeDtypeStruct(batch["y"].shape, batch["y"].dtype), batch["y"])
            ctrl.hook(in_hook)
            return descend_and_count(state, {**batch, "y": y})

        with ad.Program(driver, COUNTED, DATA, global_batch=12) as program:
            lost, sizes = [], set()
            for report in program.run(steps=STEPS):
                lost += [loss.workers for loss in report.lost]
                sizes.add(report.global_batch)
            assert lost == [(0,), (2,)], lost
            assert report.members == (1,)
            assert sizes == {12}, sizes
            assert world.rank == 0  # ranks are renumbered
            check_counted(program.state, [12] * STEPS)


def hangs() -> None:
    """Rank 1 stops itself; rank 0 goes on without it."""
    with (
        comm.world(hang_timeout=max(1.0, at_start())) as world,
        ad.Program(descend_and_count, COUNTED, DATA, global_batch=12) as program,
    ):
        for report in program.run(steps=STEPS):
            if report.step == 5 and world.rank == 1:
                signal_myself(signal.SIGSTOP)
        assert report.members == (0,)
        check_counted(program.state, [12] * STEPS)


def grows() -> None:
    """One rank asks for two; the second is started, and joins."""

    def adapt(control):
        if control.step == 3:
            control.rescale(workers=2)

    def driver(state, batch):
        ctrl.hook(adapt)
        return descend_and_count(state, batch)

    with comm.world(max_workers=2) as world, ad.Program(driver, COUNTED, DATA, global_batch=12) as program:
        joined, deadline = 0, time.monotonic() + limit(60)
        for report in program.run():
            joined = joined or (report.step if report.members == (0, 1) else 0)
            time.sleep(0 if joined else 0.05)  # leave the joining rank time for its imports
            late = float(comm.all_reduce(jnp.asarray(float(time.monotonic() > deadline)), op="max"))
            if late or (joined and report.step > joined + 5):
                break
        assert joined, "nobody has joined"
        assert report.batch_sizes == (6, 6)
        check_counted(program.state, [12] * program.steps)
        print(f"worker {world.workers[0]} is one of {world.size}", flush=True)


def one_is_preempted() -> None:
    """Rank 1 gets SIGTERM, and leaves; rank 0 goes on with the same global batch."""
    with comm.world() as world, ad.Program(descend_and_count, COUNTED, DATA, global_batch=12) as program:
        own, alone = world.rank, False
        try:
            for report in program.run(steps=5000):
                if report.step == 5 and own == 1:
                    signal_myself(signal.SIGTERM)
                time.sleep(0.002)
                if report.members == (0,):
                    break
        except ad.Preempted as error:
            alone = error.alone
        if own == 1:
            assert alone, "the signal had no effect, or also on the others"
            print("rank 1 has left", flush=True)
            raise SystemExit(0)
        assert (report.members, report.global_batch) == ((0,), 12)
        assert any("upon a termination signal: worker 1 (SIGTERM" in note for note in report.notes), report.notes
        check_counted(program.state, [12] * program.steps)


def all_are_preempted() -> None:
    """Both ranks get SIGTERM: the last state is written before they end."""
    with comm.world(), ad.Program(descend_and_count, COUNTED, DATA, global_batch=12) as program:
        for report in program.run(checkpoint=ad.Checkpoints(FOLDER / "run", every=10**6)):
            time.sleep(0.002)
            if report.step == 5:
                signal_myself(signal.SIGTERM)
            assert report.step < 5000, "the signal had no effect"


def finished() -> None:
    print("ended well", flush=True)


if __name__ == "__main__":
    {
        "dies": dies,
        "hangs": hangs,
        "grows": grows,
        "one is preempted": one_is_preempted,
        "all are preempted": all_are_preempted,
    }[CASE]()
    finished()
