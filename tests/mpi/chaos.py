"""Jobs with random faults: `adaptive run -n 4 chaos.py SEED FOLDER`.

The seed determines all events (`schedule`). Processes are killed, stopped for a while, slowed down, or receive SIGTERM,
at any moment, also while a program is built or restored. Workers join and leave; batches and shares change. A job that
must fail does so by its last event. `tests/mpi/chaotic.py` starts such jobs and checks their results.

Each process appends lines of JSON to FOLDER/log: events as they happen, repairs, and its last state.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

STEPS = 400
EXAMPLES = 160
BATCHES = (16, 24, 32, 48, 64)

EACH_STEP = ("between", "a hook", "a frame", "an exchange", "a commit")
AT_CHANGES = ("a change", "a meeting", "an admission", "an agreement", "a hand-over", "a repair", "a wait")
GATHERS = ("building 1", "building 2", "building 3", "restoring 1", "restoring 2")  # one of those of a stage
BESIDE = ("evaluate", "a checkpoint", "a compile", "any time")
STRATEGIES = ("diloco", "islands", "quorum")


class Event(NamedTuple):
    """Something that happens once."""

    step: int  # from which on
    kind: str
    worker_slot: int  # whose process it happens to; -1: to all alike
    phase: str  # where: when that process next comes there
    delay: float  # seconds from then on
    value: Any = None


class Schedule(NamedTuple):
    """A job, as it follows from a seed."""

    seed: int
    processes: int
    workers: int  # at first
    keeps: int  # a worker slot that is not killed, and always has a worker
    steps: tuple[int, ...]  # of each run
    warm: bool
    balanced: bool
    messages: int
    batch: int
    ends: str  # "well", or how
    events: tuple[Event, ...]
    strategy: str  # trained beside the plain loop's model; "" for none


def schedule(seed: int, strategy: str = "") -> Schedule:
    """The job of a seed, to which the same happens with any strategy."""
    r = random.Random(seed)
    n = r.choice((2, 3, 3, 4, 4, 4))
    keeps = r.choice((0, 0, 1, n - 1)) if n > 2 else r.choice((0, 1))
    workers = r.randint(keeps + 1, n)
    first = STEPS if r.random() < 0.5 else r.randint(STEPS // 4, 3 * STEPS // 4)
    ends = r.choice(("well",) * 10 + ("raise", "too few"))
    mortal = [worker_slot for worker_slot in range(n) if worker_slot != keeps]
    r.shuffle(mortal)
    events = []

    def add(kind: str, worker_slot: int, phases: tuple[str, ...], value: Any = None) -> Event:
        step = r.randint(2, STEPS - 5)
        delay = r.choice((0.0, r.uniform(0, 0.004)))
        events.append(Event(step, kind, worker_slot, r.choice(phases), delay, value))
        return events[-1]

    changes = [add("workers", -1, ("a hook", "between"), r.randint(keeps + 1, n)).step for _ in range(r.randint(5, 9))]
    kills = r.sample(mortal, r.choice((1, min(2, len(mortal)), len(mortal)))) if ends != "raise" else []
    at_once = r.randint(2, STEPS - 5) if len(kills) > 1 and r.random() < 0.4 else None
    for worker_slot in kills:
        event = add("kill", worker_slot, r.choice((EACH_STEP, EACH_STEP, AT_CHANGES, AT_CHANGES, BESIDE)))
        step = at_once or (r.choice(changes) if event.phase in AT_CHANGES else event.step)
        events[-1] = event._replace(step=step)
    for _ in range(r.randint(2, 5)):
        add("stop", r.randrange(n), r.choice((EACH_STEP, AT_CHANGES, ("any time",))), r.uniform(0.005, 0.2))
    for _ in range(r.randint(2, 5)):
        add("slow", r.randrange(n), r.choice((EACH_STEP, AT_CHANGES)), r.uniform(0.005, 0.1))
    for _ in range(r.randint(2, 4)):
        add("batch", -1, ("a hook", "between"), r.choice(BATCHES))
    if r.random() < 0.5:
        add("shares", -1, ("a hook", "between"), [r.randint(1, 4) for _ in range(n)])
    if ends == "raise":
        last = add("raise", keeps, ("between", "a hook"))
        events[-1] = last._replace(step=STEPS - 5)
    if ends == "well" and r.random() < 0.5:
        add(
            "SIGTERM",
            r.choice([worker_slot for worker_slot in mortal if worker_slot not in kills] or mortal),
            r.choice((EACH_STEP, AT_CHANGES, BESIDE)),
        )
    _add_to_gathers(random.Random(f"{seed}, gathers"), events, mortal if ends == "well" else [])
    if ends == "too few":
        last = add("kill", keeps, EACH_STEP)
        events[:] = [e for e in events if e.kind != "kill"]
        events += [
            last._replace(worker_slot=worker_slot, step=STEPS - 5, phase=r.choice(EACH_STEP))
            for worker_slot in range(n)
        ]
    return Schedule(
        seed,
        n,
        workers,
        keeps,
        (first, STEPS - first) if first < STEPS else (STEPS,),
        r.random() < 0.6,
        r.random() < 0.5,
        r.choice((1, 2)),
        r.choice(BATCHES),
        ends,
        tuple(sorted(events, key=lambda e: e.step)),
        strategy,
    )


def _add_to_gathers(r: random.Random, events: list[Event], mortal: list[int]) -> None:
    """Kill another process while a program is built or restored; or, if all that may die do so anyway, one of these."""
    gone = [n for n, event in enumerate(events) if event.kind in ("kill", "SIGTERM")]
    free = [worker_slot for worker_slot in mortal if worker_slot not in {events[n].worker_slot for n in gone}]
    if free:
        events.append(Event(0, "kill", r.choice(free), r.choice(GATHERS), 0.0))
    elif mortal and r.random() < 0.5:
        n = r.choice([n for n in gone if events[n].kind == "kill"])
        events[n] = events[n]._replace(step=0, phase=r.choice(GATHERS), delay=0.0)


# --- in a job ---------------------------------------------------------------------------------------------------------


class Log:
    """What all processes of a job append to."""

    def __init__(self, folder: str):
        self._file = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **values})
        os.write(self._file, f"{line}\n".encode())


class Hand:
    """A separate process that sends signals on request, after a delay."""

    def __init__(self) -> None:
        reads, self._writes = os.pipe()
        if os.fork():
            os.close(reads)
            return
        os.close(self._writes)
        self._serve(reads)
        os._exit(0)

    def send(self, pid: int, number: int, delay: float, then: float = 0.0) -> None:
        """Send a signal; and SIGCONT, `then` seconds later."""
        os.write(self._writes, f"{pid} {number} {delay} {then}\n".encode())

    @staticmethod
    def _serve(reads: int) -> None:
        due: list[tuple[float, int, int]] = []
        is_open, rest = True, ""
        while is_open or due:
            wait = max(0.0, min(due)[0] - time.monotonic()) if due else None
            if is_open and select.select([reads], [], [], wait)[0]:
                data = os.read(reads, 4096).decode()
                is_open = bool(data)
                *lines, rest = (rest + data).split("\n")
                for line in lines:
                    pid, number, delay, then = line.split()
                    at = time.monotonic() + float(delay)
                    due.append((at, int(pid), int(number)))
                    if float(then):
                        due.append((at + float(then), int(pid), signal.SIGCONT))
            elif not is_open and due:
                time.sleep(wait or 0.0)
            for order in sorted(due):
                if order[0] <= time.monotonic():
                    due.remove(order)
                    with suppress(ProcessLookupError):
                        os.kill(order[1], order[2])


class Chaos:
    """What happens to this process."""

    def __init__(self, plan: Schedule, log: Log, hand: Hand):
        self._log, self._hand = log, hand
        self._left = [event for event in plan.events if event.worker_slot >= 0]
        self.worker_slot, self.step, self.in_reserve = -1, 0, lambda: False
        self._inside = False
        self._stage, self._gathers = "", 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Every gather in here is a phase: "building 1" is the first while a program is built."""
        self._stage, self._gathers = name, 0
        try:
            yield
        finally:
            self._stage = ""

    def gather(self) -> None:
        """This process comes to a gather."""
        if self._stage:
            self._gathers += 1
            self.phase(f"{self._stage} {self._gathers}")

    def phase(self, name: str) -> None:
        """This process comes to a phase."""
        if self._inside or self.worker_slot < 0:
            return
        for event in self._left:
            mine = event.worker_slot == self.worker_slot and event.phase in (name, "any time")
            if mine and (self.step >= event.step or (self.in_reserve() and event.phase in AT_CHANGES)):
                self._left.remove(event)
                self._inside = True
                try:
                    self._happen(event, name)
                finally:
                    self._inside = False
                return

    def _happen(self, event: Event, name: str) -> None:
        self._log.write(
            "event", kind=event.kind, phase=event.phase, at=name, worker_slot=self.worker_slot, step=self.step,
            reserve=bool(self.in_reserve()),
        )  # fmt: skip
        me = os.getpid()
        if event.kind == "kill" and not event.delay:
            os.kill(me, signal.SIGKILL)
        elif event.kind == "kill":
            self._hand.send(me, signal.SIGKILL, event.delay)
        elif event.kind == "SIGTERM":
            self._hand.send(me, signal.SIGTERM, event.delay)
        elif event.kind == "stop":
            self._hand.send(me, signal.SIGSTOP, event.delay, event.value)
        elif event.kind == "slow":
            time.sleep(event.value)
        elif event.kind == "raise":
            raise RuntimeError("as the schedule says")

    def around(self, name: str, kind: Any, method: str) -> None:
        """Make a function a phase."""
        self.before(partial(self.phase, name), kind, method)

    def before(self, happens: Callable[[], None], kind: Any, method: str) -> None:
        """Have something happen before a function."""
        original = getattr(kind, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            happens()
            return original(*args, **kwargs)

        setattr(kind, method, wrapped)


def main(seed: int, folder: str, strategy: str = "") -> None:
    plan, log, hand = schedule(seed, strategy), Log(folder), Hand()
    log.write("begun")
    import faulthandler

    faulthandler.dump_traceback_later(float(os.environ.get("CHAOS_STACKS", "40")))
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    import numpy as np

    import adaptive as ad
    import collectives as comm
    import controllers as ctrl
    import monitors as mon
    from adaptive.runtime.finite import FiniteCheck
    from adaptive.runtime.host_step import HostStep
    from adaptive.runtime.kernels.compiled import CompiledKernels
    from collectives.worlds import mpi
    from collectives.worlds.elastic import elastic_world, rendezvous
    from collectives.worlds.transport import mpi_channel, mpi_transport, operations, repair, transport
    from tests.mpi.chaos_reference import begun, data, gradient, made_step, strategy_of, value_and_grad

    chaos = Chaos(plan, log, hand)
    for name, kind, method in (
        ("a frame", transport, "announce"),
        ("an exchange", mpi_channel.ReduceByMPI, "carry_out"),
        ("an exchange", FiniteCheck, "passes"),
        ("a commit", HostStep, "_commit"),
        ("a change", elastic_world.ElasticWorld, "change"),
        ("a meeting", rendezvous, "_meet"),
        ("an admission", rendezvous, "_admit"),
        ("an agreement", mpi, "all_agree"),
        ("an agreement", mpi_transport, "all_agree"),
        ("an agreement", rendezvous, "all_agree"),
        ("an agreement", repair, "all_agree"),
        ("a hand-over", operations.StateTransfer, "carry_out"),
        ("a repair", mpi_transport, "repair"),
        ("a wait", elastic_world, "stand_by"),
        ("evaluate", ad.Program, "evaluate"),
        ("a checkpoint", ad.Program, "checkpoint"),
        ("a compile", CompiledKernels, "compile"),
    ):
        chaos.around(name, kind, method)
    chaos.before(chaos.gather, operations.GatherBytes, "carry_out")
    to_all: dict[tuple[str, int], list[Event]] = {}
    for event in plan.events:
        if event.worker_slot < 0:
            to_all.setdefault((event.phase, event.step), []).append(event)

    def adapt(control: Any) -> None:
        chaos.step = control.step
        chaos.phase("a hook")
        for event in to_all.get(("a hook", control.step), []):
            log.write(
                "event", kind=event.kind, phase="a hook", at="a hook", worker_slot=chaos.worker_slot, step=control.step
            )
            if event.kind == "workers":
                control.rescale(workers=event.value)
            elif event.kind == "batch":
                control.rescale(global_batch=event.value)
            else:
                control.rescale(shares=event.value)

    def by_hand(step: int) -> None:
        for event in to_all.get(("between", step), []):
            log.write("event", kind=event.kind, phase="between", at="between", worker_slot=chaos.worker_slot, step=step)
            if event.kind == "workers":
                program.rescale(workers=world.nearest(event.value))
            elif event.kind == "batch":
                program.rescale(global_batch=event.value)
            elif any(event.value[worker_slot] for worker_slot in world.members):
                program.rescale(shares=event.value)

    def driver(state: Any, batch: Any) -> Any:
        grads = comm.all_reduce(gradient(state["model"], batch))
        count = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
        metrics = {}
        if plan.messages == 2:
            metrics["spread"] = comm.all_reduce(jnp.square(batch["x"].mean() - grads["w"].sum()))
        ctrl.hook(adapt)
        if plan.balanced:
            ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=5)
        rounds = strategy.step(state["rounds"], value_and_grad, batch)[0] if strategy else ()
        new = {
            "rounds": rounds,
            "model": made_step(state["model"], grads),
            "taken": state["taken"] + count,
            "batches": state["batches"].at[state["step"]].set(count.sum()),
            "step": state["step"] + 1,
        }
        return new, metrics

    examples = data()
    with comm.world(workers=plan.workers) as world:
        chaos.worker_slot = world.workers[0]
        chaos.in_reserve = lambda: world.in_reserve
        strategy = strategy_of(plan.strategy, plan.processes)
        options = {"per_worker_state": lambda state: strategy.per_worker_state(state["rounds"])} if strategy else {}
        nothing_yet = {
            "rounds": strategy.init(begun()["w"]) if strategy else (),
            "model": begun(),
            "taken": jnp.zeros(EXAMPLES, jnp.int32),
            "batches": jnp.zeros(STEPS, jnp.int32),
            "step": jnp.zeros((), jnp.int32),
        }
        with chaos.stage("building"):
            program = ad.Program(driver, nothing_yet, examples, global_batch=plan.batch, seed=plan.seed, **options)
        kept = ad.Checkpoints(os.path.join(folder, "kept"), every="100 steps")
        if plan.warm:
            program.warm_up()
        lost = 0
        for steps in plan.steps:
            log.write("run", worker_slot=chaos.worker_slot)
            for report in program.run(steps=steps, checkpoint=kept):
                chaos.step = report.step
                assert sum(report.batch_sizes) == report.global_batch, report
                assert all(
                    size == 0
                    for worker_slot, size in enumerate(report.batch_sizes)
                    if worker_slot not in report.members
                )
                for loss in world.losses[lost:]:
                    seconds, lost = report.seconds, lost + 1
                    log.write(
                        "lost",
                        worker_slot=chaos.worker_slot,
                        phase=loss.phase,
                        repair=loss.seconds,
                        step_seconds=seconds,
                    )
                if report.joined:
                    log.write("joined", worker_slot=chaos.worker_slot, worker_slots=report.joined)
                by_hand(report.step)
                chaos.phase("between")
            chaos.step = program.steps
            mean = program.evaluate(lambda state, batch: jnp.square(batch["x"]).mean(), examples, batch=48)
            np.testing.assert_allclose(mean, np.square(examples["x"]).mean(), rtol=1e-12)
            program.checkpoint()
            with chaos.stage("restoring"):
                program.restore(kept)
            assert program.steps == chaos.step
        state = program.state
        assert program.steps == STEPS == state["step"], (program.steps, state["step"])
        result = {
            "worker_slot": chaos.worker_slot,
            "members": list(world.members),
            "batches": np.asarray(state["batches"]).tolist(),
            "taken": np.asarray(state["taken"]).tolist(),
            "model": {name: np.asarray(leaf).tolist() for name, leaf in state["model"].items()},
            "rounds": np.asarray(strategy.model(state["rounds"])).tolist() if strategy else [],
            "outer": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state["rounds"].outer)] if strategy else [],
        }
    log.write("ended", **result)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
