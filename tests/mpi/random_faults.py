"""Random faults in random phases of a job: `python -m tests.mpi.random_faults --jobs 200 [--seed 0]`.

Each job has three ranks, of which one is in reserve at first. A fault has a way, a phase and victims. The job must end
soon, with the right exit code, a message that names a victim, and nothing left behind; those who come to the end have
taken the same examples as one worker. `adaptive run -n 3 random_faults.py --rank PHASE WAY RANK,…  FOLDER` is one job.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

BATCH, STEPS, RANKS, HANG_TIMEOUT, LIMIT = 12, 24, 3, 8.0, 150.0
BEFORE, AFTER = ("import", "world"), ("exit",)
INSIDE = (
    "build", "first compile", "step", "exchange", "hook", "joining", "leaving", "evaluate", "checkpoint", "writing",
    "restore", "reading", "end of run",
)  # fmt: skip
LOSSES = ("SIGKILL", "SIGSTOP", "os._exit(0)")
LEAVES = ("SIGTERM", "SIGUSR1")
ERRORS = {"os._exit(3)": 3, "sys.exit(3)": 3, "raises": 1}
WAYS = (*LOSSES, *LEAVES, *ERRORS, "sys.exit(0)")


NOT_REACHED = "the phase was not reached"


class Fault(NamedTuple):
    """What happens in a job."""

    phase: str
    way: str
    victims: tuple[int, ...]


def draw(seed: int) -> Fault:
    """Return the fault of a seed."""
    r = random.Random(seed)
    while True:
        phase = r.choice((*BEFORE, *INSIDE, *AFTER))
        victims = tuple(sorted(r.sample(range(RANKS), r.choice((1, 1, 1, 2, RANKS)))))
        if phase == "writing":  # one rank does, in a thread
            victims = (0,)
        fault = Fault(phase, r.choice(WAYS), victims)
        # Where all ranks or all members are stopped, the job is suspended: none of them waits for another.
        stopped_unwatched = fault.way == "SIGSTOP" and (phase not in INSIDE or {0, 1} <= set(victims))
        python_at_exit = phase == "exit" and fault.way in ("sys.exit(0)", "sys.exit(3)", "raises")  # Python ignores it
        # `sys.exit(0)` in a world is the end of its block for this rank: all raise, unless all do it at once.
        meets = fault.way == "sys.exit(0)" and phase in INSIDE and len(victims) > 1
        # Rank 2 is in reserve, and is not in these phases: members alone are.
        in_reserve = ("step", "exchange", "hook", *(("joining", "checkpoint") if len(victims) < RANKS else ()))
        absent = phase in in_reserve and 2 in victims
        in_thread = phase == "writing" and fault.way in ("sys.exit(0)", "sys.exit(3)", "raises")
        if not (stopped_unwatched or python_at_exit or meets or absent or in_thread):
            return fault


def expected(fault: Fault) -> tuple[set[int], int | None]:
    """Return the exit codes that are right, and how many ranks come to the end; None: any number."""
    phase, way, victims = fault
    number = getattr(signal, way) if way.startswith("SIG") else 0
    everyone = len(victims) == RANKS
    members = everyone or victims == (0, 1)  # rank 2 may have joined late, and still be one
    if phase in BEFORE:
        if way in ERRORS:
            return {ERRORS[way]}, None
        if number:
            return {128 + number}, None
        return ({0, 1} if everyone else {1}), None
    if phase in AFTER:
        code = 128 + number if number else ERRORS.get(way, 0)
        return {code}, RANKS  # all have printed their line before
    if way in ERRORS:
        return {ERRORS[way]}, None
    if way == "sys.exit(0)":
        return {1}, None
    if way in LEAVES:  # without a step that follows, the work is done
        return ({0, 143} if everyone or members else {0}), None
    if everyone:
        killed = 1 if way == "os._exit(0)" else 128 + signal.SIGKILL
        # Rank 2 is in reserve, and may hear of the others before it comes to the place itself.
        return ({1, killed} if phase in ("joining", "leaving", "checkpoint", "reading") else {killed}), 0
    return ({0, 1, 137} if members else {0}), None if members else RANKS - len(victims)


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank(phase: str, way: str, victims: str, folder: str) -> None:
    """Run the job of one rank, to which the fault happens if it is a victim."""
    own = int(os.environ["OMPI_COMM_WORLD_RANK"])
    pending = [phase] if own in map(int, victims.split(",")) else []

    def at(name: str) -> None:
        if name in pending:
            pending.clear()
            print(f"fault of rank {own}", flush=True)
            _happen(way)

    at("import")
    import numpy as np

    import adaptive as ad
    import collectives as comm
    import controllers as ctrl
    from adaptive.runtime.engine import Engine
    from collectives.worlds import mpi
    from collectives.worlds.transport import transport
    from tests.contract.problem import COUNTED, DATA, EXAMPLES, RATE, descend_and_count, gradient, mean_loss
    from tests.problems import stream

    def before(name: str, kind: Any, method: str) -> Callable[..., Any]:
        original = getattr(kind, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            at(name() if callable(name) else name)
            return original(*args, **kwargs)

        setattr(kind, method, wrapped)
        return original

    def driver(state: Any, batch: Any) -> Any:
        at("build")
        ctrl.hook(lambda control: control.step < 6 or at("hook"), every=2)
        return descend_and_count(state, batch)

    def evaluated(state: Any, batch: Any) -> Any:
        at("evaluate")
        return mean_loss(state["w"], batch)

    before("world", mpi, "all_processes")
    with comm.world(workers=2, hang_timeout=HANG_TIMEOUT) as world:
        before("first compile", Engine, "compile")
        program = ad.Program(driver, COUNTED, DATA, global_batch=BATCH)
        program.warm_up()
        before(lambda: "joining" if program.target_workers > 2 else "leaving", comm.MPIWorld, "change")
        for report in program.run(steps=STEPS):
            at("step")
            if report.step == 4:
                before("exchange", transport, "announced")
            if report.step == 8 and world.most > 2:
                program.rescale(workers=3)
            if 8 < report.step < 16 and world.size < 3:
                time.sleep(0.5)  # for the process in reserve, to get ready
            if report.step == 16 and world.size > 2:
                program.rescale(workers=2)
        at("end of run")
        found = program.evaluate(evaluated, DATA, batch=16)
        np.testing.assert_allclose(found, mean_loss(np.asarray(program.state["w"]), DATA), rtol=1e-12)
        before("writing", np, "save")
        before("reading", np, "load")
        for _ in program.run(steps=1, checkpoint=ad.Checkpoints(folder)):
            at("checkpoint")
        at("restore")
        program.restore(folder)
        for _ in program.run(steps=1):
            pass
        rows = stream(EXAMPLES, 0, BATCH * (STEPS + 2))
        w = COUNTED["w"]
        for batch in rows.reshape(-1, BATCH):
            w = w - RATE * gradient(w, batch)
        np.testing.assert_array_equal(program.state["taken"], np.bincount(rows, minlength=EXAMPLES))
        np.testing.assert_allclose(program.state["w"], w, rtol=0, atol=1e-12)
        if world.rank == 0:
            print("\n".join(map(str, world.losses)), flush=True)
    print("ended well", flush=True)
    atexit.register(at, "exit")


def _happen(way: str) -> None:
    match way:
        case "os._exit(0)" | "os._exit(3)":
            os._exit(int(way[9]))
        case "sys.exit(0)" | "sys.exit(3)":
            sys.exit(int(way[9]))
        case "raises":
            raise OSError("no space left")
        case _:
            os.kill(os.getpid(), getattr(signal, way))


# --- all jobs ---------------------------------------------------------------------------------------------------------


def run(fault: Fault, limit: float = LIMIT) -> tuple[list[str], str]:
    """Run a job. Returns what went wrong, and its output."""
    from tests import mpirun

    with tempfile.TemporaryDirectory() as folder:
        victims = ",".join(map(str, fault.victims))
        arguments = ["--rank", fault.phase, fault.way, victims, os.path.join(folder, "kept")]
        job = subprocess.Popen(
            [sys.executable, "-m", "launchers.run", "-n", str(RANKS), __file__, *arguments],
            env={**mpirun.environment(), "JAX_ENABLE_X64": "1"}, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wrong = []
        try:
            output = job.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            wrong.append("hang")
            output = ""
        left = _kill_session(job.pid)
        if wrong:
            return wrong, job.communicate()[0]
    codes, well = expected(fault)
    if job.returncode not in codes:
        wrong.append(f"code {job.returncode} instead of {codes}")
    if well is not None and output.count("ended well") != well:
        wrong.append(f"{output.count('ended well')} ended well instead of {well}")
    if not any(f"fault of rank {victim}" in output for victim in fault.victims):
        wrong = [f"code {job.returncode}"] * (job.returncode != 0) or [NOT_REACHED]
    says = re.sub(r"^(fault of rank|\+).*$", "", output, flags=re.MULTILINE)
    named = any(re.search(rf"rank {victim}\b", says) for victim in fault.victims)
    quiet = fault.way in LEAVES or (fault.way == "os._exit(0)" and fault.phase == "exit") or job.returncode == 0
    if not named and not quiet:
        wrong.append("no victim is named")
    return wrong + [f"left behind: {name}" for name in left], output


def _kill_session(session: int) -> list[str]:
    """Kill what is left of a job. Returns it."""
    from tests.speed import limit  # not in a rank, which is started by the path of this file

    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    _, alive = psutil.wait_procs(found, timeout=limit(3))
    names = [f"{process.pid} {process.name()}" for process in alive if process.is_running()]
    for process in alive:
        process.kill()
    return names


def main() -> None:
    """Run jobs, print those that went wrong, and end with 1 if there was one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", nargs=4)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.rank:
        rank(*args.rank)
        return
    bad = 0
    for seed in range(args.seed, args.seed + args.jobs):
        fault, began = draw(seed), time.monotonic()
        wrong, output = run(fault)
        bad += bool(wrong)
        print(f"{seed}: {fault.way} in {fault.phase} of {fault.victims}, {time.monotonic() - began:.1f} s: ", end="")
        print("; ".join(wrong) or "well", flush=True)
        if wrong:
            print(output, flush=True)
    print(f"{args.jobs} jobs, {bad} wrong")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
