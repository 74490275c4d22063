"""A trace shows every process's steps, on one clock: over every world as it stands."""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import jax.numpy as jnp
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

from .problems import same_everywhere

COVERS = ("adaptive/base/timeline.py", "adaptive/observe/trace.py", "adaptive/program/tracing.py")

STEPS_TRACED = 4


@pytest.fixture
def folder():
    """Of this process alone: pytest's own, which ranks would clear away at once, are not."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def driver(state, batch):
    mean = comm.all_reduce(batch["x"].mean(0))
    ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=2)
    return state + mean, {}


def built(world):
    return ad.Program(driver, jnp.zeros(3), {"x": jnp.ones((96, 3))}, global_batch=6 * world.size, world=world)


def spans_of(path):
    """Spans by process and track, and what processes and tracks are called."""
    events, spans, names = json.loads(Path(path).read_text())["traceEvents"], defaultdict(list), {}
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
        elif event["name"] in ("process_name", "thread_name"):
            names[event["pid"], event.get("tid")] = event["args"]["name"]
    return spans, names


def test_all_workers_are_in_it(world, folder):
    path = folder / "trace.json"
    with built(world) as program:
        program.step()
        program.trace(path, steps=STEPS_TRACED)
        sums = [sum(program.step().breakdown) for _ in range(STEPS_TRACED + 2)]
    assert len(sums) == STEPS_TRACED + 2
    if world.rank:
        assert not path.exists()
        return
    spans, names = spans_of(path)
    assert {pid for pid, _ in spans} == set(range(world.processes))
    assert {f"worker {w}" for w in range(world.size)} <= set(names.values())
    for pid in range(world.processes):
        of_process = [e for (p, _), track in spans.items() if p == pid for e in track]
        counts = Counter(e["name"].split(",")[0] for e in of_process)
        workers = world.size // world.processes
        assert counts["input"] == counts["exchanging"] == STEPS_TRACED
        assert counts["hooks"] == STEPS_TRACED // 2  # the hook is due in every other step
        assert counts["final"] == workers * STEPS_TRACED
        examples = [e for e in of_process if e["name"].endswith("examples") and "level" in e["args"]]
        assert sum(sum(map(int, e["name"].split()[:-1:2])) for e in examples) == 6 * workers * STEPS_TRACED


def test_nested_spans_lie_within_their_parent(world, folder):
    path = folder / "trace.json"
    with built(world) as program:
        program.trace(path)
        for _ in program.run(steps=3):
            pass  # ends before all are there: what there is, is written
    if world.rank:
        return
    spans, names = spans_of(path)
    for track, found in spans.items():
        if names[track] == "compiler":
            continue
        under_way = []
        for event in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
            began, ended = event["ts"], event["ts"] + event["dur"]
            under_way = [end for end in under_way if end > began + 0.01]
            assert all(ended <= end + 0.01 for end in under_way), event
            under_way.append(ended)


def test_a_file_that_cannot_be_written_raises_at_once(world, folder):
    with built(world) as program:
        if world.processes == 1:
            with pytest.raises(FileNotFoundError):
                program.trace(folder / "no folder" / "trace.json")
            with pytest.raises(ad.AdaptiveError, match="steps"):
                program.trace(folder / "trace.json", steps=0)
        report = program.step()
        same_everywhere(world, report.step)


def test_a_trace_after_the_run_is_not_an_empty_file(world, folder, caplog):
    """It traces the steps to come, and there are none."""
    path = folder / "trace.json"
    with caplog.at_level(logging.WARNING, "adaptive"), built(world) as program:
        list(program.run(steps=2))
        program.trace(path, steps=3)
        assert not path.exists()
    said = [r.message for r in caplog.records if "trace" in r.message]
    assert not path.exists()
    assert len(said) == (world.rank == 0)
    assert all("no step ran after program.trace(), which traces the next 3 steps" in line for line in said)


def test_closing_a_program_writes_its_trace_or_warns(world, folder, caplog):
    path = folder / "trace.json"
    with caplog.at_level(logging.WARNING, "adaptive"), built(world) as program:
        program.trace(path)
        program.step()
    said = [r.message for r in caplog.records if "trace" in r.message]
    if world.processes == 1:
        assert said == []
        assert spans_of(path)[0]
    else:
        assert not path.exists()
        assert [("only 1 of the 20 steps" in line) for line in said] == [True] * (world.rank == 0)
