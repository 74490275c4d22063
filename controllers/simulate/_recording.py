"""A recorded run, read back from the lines of JSON that `Program.run(record="trace.jsonl")` wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Limits, Observation
from adaptive.base.errors import RecordError
from adaptive.extend import read_run
from controllers.policies.noise import read_noise

_NAME = re.compile(r"(\w+)\.?(.*)")  # name of a leaf: the value's name, and the path in the value
_OF_NOISE = {"scale", "lower", "upper"}  # fields of a NoiseScale that policies read


class RecordedHook(NamedTuple):
    every: int
    leaves: tuple[str, ...]  # names of its values' leaves, such as "noise.scale"


class RecordedStep(NamedTuple):
    """One line of a trace."""

    seen: Observation  # as each hook saw the step; without the hook's values
    seconds: float  # of the whole step, measured by rank 0
    hooks: dict[str, list[Any]]  # the leaves of the values that each received; without hooks that did not run
    decision: Decision | None


@dataclass(frozen=True)
class Recording:
    """A recorded run, as written by rank 0."""

    workers: int
    limits: Limits
    hooks: dict[str, RecordedHook]  # by name
    steps: tuple[RecordedStep, ...]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Examples per worker; shape=(steps, n)."""
        return np.array([step.seen.batch_sizes for step in self.steps], np.int64)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Compute seconds of each step; shape=(steps, n), NaN where not known. A RecordError if none were recorded."""
        reported = self.series("seconds")
        if reported is None:
            raise RecordError(
                "no hook of this run received the workers' compute seconds, so their speed is not known. Record a run "
                "with\n    ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()))"
            )
        rows = np.concatenate([reported[1:], np.full((1, self.workers), np.nan)])  # reported one step later
        return np.where(rows > 0, rows, np.nan)

    def series(self, signal: str) -> np.ndarray | None:
        """Return a hook's value of one number per worker; shape=(steps, n), NaN where not known; None without it."""
        for name in self.hooks:
            given = [self.signals(name, step) if step.hooks.get(name) else {} for step in self.steps]
            if any(np.shape(values.get(signal, ())) == (self.workers,) for values in given):
                return np.array([values.get(signal, [np.nan] * self.workers) for values in given])
        return None

    def signals(self, name: str, step: RecordedStep) -> dict[str, Any]:
        """Return a hook's values of a step, by name: arrays, or dicts of arrays; a noise scale as `noise_scale`."""
        values: dict[str, dict[str, np.ndarray]] = {}
        for label, leaf in zip(self.hooks[name].leaves, step.hooks[name], strict=True):
            root, inner = _NAME.fullmatch(label).groups()  # type: ignore[union-attr]
            values.setdefault(root, {})[inner] = np.asarray(leaf, np.float64)  # NaN is null, and infinities are text
        found: dict[str, Any] = {}
        for root, fields in values.items():
            value = fields.get("", fields)
            if fields.keys() >= _OF_NOISE:
                found["noise_scale"] = read_noise(SimpleNamespace(**fields))
            else:
                found[root] = read_noise(value) if root == "noise_scale" else value
        return found


def read_trace(path: str | Path, run: int = -1) -> Recording:
    """Read a recorded run from its file. Skips incomplete lines, with a warning in the log "adaptive".

    Args:
      path: the file, as passed to `Program.run(record=…)`.
      run: index of the run, if the file has several; by default the last.

    Raises:
      RecordError: the file is not a trace, has another version, or its run has no steps.
    """
    header, lines = read_run(path, run)
    steps = [line for _, line in lines]
    if not steps:
        raise RecordError(f"{path}: the run has no steps.")
    limits = Limits(tuple(header["lower"]), tuple(header["upper"]), header["quantum"], header.get("multiple", 1))
    hooks = {hook["name"]: RecordedHook(hook["every"], tuple(hook["leaves"])) for hook in header["hooks"]}
    return Recording(header["workers"], limits, hooks, tuple(_step(line, limits, hooks) for line in steps))


def _step(line: dict[str, Any], limits: Limits, hooks: dict[str, RecordedHook]) -> RecordedStep:
    sizes, asked = tuple(line["batch_sizes"]), line["asked"]
    target, least, most = asked["workers"]
    limits = limits._replace(quantum=line.get("quantum", limits.quantum), call_overhead=line["call"])
    seen = Observation(
        step=line["step"],
        epoch=line["epoch"],
        values=(),
        batch_sizes=sizes,
        previous_batch_sizes=tuple(line["previous_batch_sizes"]),
        global_batch=asked["global_batch"],
        limits=limits.of(np.isin(range(len(sizes)), asked["active"])),
        members=tuple(line["members"]),
        joined=tuple(line["joined"]),
        target_workers=target,
        least_workers=least,
        most_workers=most,
        hyperparameters=line["hyperparameters"],
        examples=line.get("examples", 0),
    )
    ran = [] if line.get("skipped") else [name for name, hook in hooks.items() if not hook.leaves]
    return RecordedStep(seen, line["seconds"], {name: [] for name in ran} | line["hooks"], _decision(line))


def _decision(line: dict[str, Any]) -> Decision | None:
    if (asked := line["decision"]) is None:
        return None
    shares = asked["shares"] and tuple(map(float, asked["shares"]))
    of_workers = asked["workers"], asked["hyperparameters"]
    return Decision(asked["global_batch"], shares, asked["stop"], tuple(line["notes"]), *of_workers)
