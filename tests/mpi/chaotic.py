"""Start the jobs of `chaos.py`, and say whether all went as it must."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests import mpirun, speed

from .chaos import STEPS, Schedule, schedule
from .chaos_reference import begun, mean_loss, plain_loop, taken

SCRIPT = Path(__file__).with_name("chaos.py")
LIMIT = 120.0  # seconds for a job
GOES = ("kill", "SIGTERM")  # what happens to processes that do not come to the end
ENDING = 10.0  # seconds for the launcher, when all processes have ended well


@dataclass
class Verdict:
    """What came of a job."""

    plan: Schedule
    code: int | None = None  # `None`: it had to be killed
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    difference: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""

    @property
    def events(self) -> list[dict[str, Any]]:
        """Those that have happened; what happens to all alike counts once."""
        found: dict[Any, dict[str, Any]] = {}
        for line in self.log:
            if line["what"] == "event":
                to_all = line["kind"] in ("workers", "batch", "shares")
                found.setdefault(
                    (line["kind"], line["step"], line["phase"], None if to_all else line["worker_slot"]), line
                )
        return list(found.values())

    @property
    def repairs(self) -> list[float]:
        """Seconds of the repairs, one for each process that was lost."""
        found: dict[Any, list[float]] = {}
        for line in self.log:
            if line["what"] == "lost":
                found.setdefault(line["worker_slot"], []).append(line["repair"])
        return max(found.values(), key=len, default=[])

    def __str__(self) -> str:
        wrong = "; ".join(self.wrong) or "well"
        plan = self.plan
        kinds = ",".join(
            f"{e['kind']}@{e['at']}:{e['worker_slot']}/{e['step']}" for e in self.events if e["kind"] != "batch"
        )
        beside = plan.strategy and f" with {plan.strategy}"
        return (
            f"seed {plan.seed}{beside}: {plan.workers}/{plan.processes} keeps {plan.keeps}, ends {plan.ends}: {wrong}; "
            f"code {self.code}, {self.seconds:.1f} s, {len(self.events)} events: {kinds}"
        )


def run(seed: int, strategy: str = "", *, limit: float = LIMIT) -> Verdict:
    """Run the job of a seed; nothing of it survives this call. A strategy is trained beside the plain loop's model."""
    plan = schedule(seed, strategy)
    verdict, deadline = Verdict(plan), speed.Deadline(limit)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launchers.run", "-n", str(plan.processes)]
        env = {**mpirun.environment(), "CHAOS_STACKS": str(deadline.limit - 10)}
        began = time.monotonic()
        with open(Path(folder) / "output", "w+") as output:
            process = subprocess.Popen(
                [*command, str(SCRIPT), str(seed), folder, strategy],
                env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                _wait(process, Path(folder) / "log", verdict, deadline)
            finally:
                verdict.wrong += [f"left behind: {name}" for name in _kill(process)]
            verdict.seconds = time.monotonic() - began
            output.seek(0)
            verdict.output = output.read()
        verdict.log = _lines(Path(folder) / "log")
    _judge(verdict)
    return verdict


def _wait(process: subprocess.Popen[bytes], log: Path, verdict: Verdict, deadline: speed.Deadline) -> None:
    ended_at = None
    while deadline.left():
        with suppress(subprocess.TimeoutExpired):
            verdict.code = process.wait(0.1)
            return
        lines = _lines(log)
        ended = {line["pid"] for line in lines if line["what"] == "ended"}
        alive = {line["pid"] for line in lines if line["what"] == "begun" and _is_there(line["pid"])}
        if ended and alive <= ended:
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > speed.limit(ENDING):
                verdict.wrong.append("slow end")
                return
    verdict.wrong.append("hang")


def _is_there(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _kill(process: subprocess.Popen[bytes]) -> list[str]:
    """Kill the remaining processes. Returns those that remained although the launcher had ended."""
    session = []
    for found in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(found.pid) == process.pid:
                session.append(found)
    ended = process.returncode is not None
    left = []
    if ended:
        _, alive = psutil.wait_procs(session, timeout=speed.limit(2))
        left = [str(p) for p in alive]
    for member in session:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    if not ended:
        process.wait()
    return left


def _lines(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]


def _judge(verdict: Verdict) -> None:
    plan, wrong = verdict.plan, verdict.wrong
    if verdict.code is None:
        return
    if (verdict.code == 0) != (plan.ends == "well"):
        wrong.append(f"exit code {verdict.code}")
    ended = [line for line in verdict.log if line["what"] == "ended"]
    if plan.ends != "well":
        if ended and plan.ends != "too few":
            wrong.append("some ended well")
        return
    killed = {line["worker_slot"] for line in verdict.log if line["what"] == "event" and line["kind"] in GOES}
    missing = set(range(plan.processes)) - killed - {line["worker_slot"] for line in ended}
    if missing:
        wrong.append(f"worker slots {sorted(missing)} did not come to the end")
    if not ended:
        return
    first = ended[0]
    batches = first["batches"]
    for line in ended[1:]:
        if any(line[name] != first[name] for name in ("batches", "taken", "model", "members", "rounds", "outer")):
            wrong.append(f"worker slots {first['worker_slot']} and {line['worker_slot']} differ")
    if len(batches) != STEPS or min(batches) < 1:
        wrong.append(f"batches {batches}")
        return
    if not np.array_equal(first["taken"], taken(plan.seed, batches)):
        wrong.append("examples lost or repeated")
    reference = plain_loop(plan.seed, batches)
    verdict.difference = max(
        float((np.abs(np.asarray(first["model"][name]) - leaf) / np.maximum(1, np.abs(leaf))).max())
        for name, leaf in reference.items()
    )
    if not verdict.difference < 1e-10:
        wrong.append(f"state is off by {verdict.difference:.1e}")
    if plan.strategy and not mean_loss(first["rounds"]) < 0.9 * mean_loss(begun()["w"]):
        wrong.append(f"{plan.strategy} has not learned: {mean_loss(first['rounds'])}")
