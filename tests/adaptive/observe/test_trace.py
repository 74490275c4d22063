"""The file of a trace: a group of tracks for each process, and times on one clock."""

from __future__ import annotations

import json

import pytest

from adaptive.base.timeline import COMPILER, STEPS, Span
from adaptive.observe.trace import OfProcess, write_trace


@pytest.fixture
def written(tmp_path):
    """The events of a written trace."""

    def written(*processes):
        write_trace(tmp_path / "trace.json", processes)
        return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    return written


def tracks(events, pid):
    """The tracks of a process in their order, and the spans of each: names, microseconds and details."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == pid and e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["pid"] == pid and e["name"] == "thread_sort_index"}
    return {
        names[tid]: [
            (e["name"], e["ts"], e["dur"], e["args"])
            for e in events
            if e.get("tid") == tid and e["pid"] == pid and e["ph"] == "X"
        ]
        for tid in sorted(names, key=order.__getitem__)
    }


def test_each_span_is_on_its_track_in_microseconds_since_the_first(written):
    spans = [
        Span(STEPS, "step", 10.0, 10.5, {}),
        Span(1, "final", 10.2, 10.3, {"level": 2}),
        Span(COMPILER, "f", 9.5, 9.75, {}),
    ]
    events = written(OfProcess("rank 0", [4, 5], spans, []))
    found = tracks(events, 0)
    assert [*found] == ["steps", "worker 4", "worker 5", "compiler"]
    assert found["steps"] == [("step", pytest.approx(5e5, rel=1e-8), pytest.approx(5e5, rel=1e-8), {})]
    assert found["worker 4"] == []
    assert found["worker 5"] == [("final", pytest.approx(7e5, rel=1e-8), pytest.approx(1e5, rel=1e-8), {"level": 2})]
    assert found["compiler"] == [("f", 0, 250_000, {})]


def test_a_process_with_one_worker_has_its_steps_on_the_workers_track(written):
    spans = [Span(STEPS, "step", 1.0, 2.0, {}), Span(0, "final", 1.0, 1.5, {})]
    events = written(OfProcess("rank 0", [7], spans, []), OfProcess("rank 1", [8], [], []))
    assert {name: [span[0] for span in found] for name, found in tracks(events, 0).items()} == {
        "worker 7": ["step", "final"],
        "compiler": [],
    }
    assert [*tracks(events, 1)] == ["worker 8", "compiler"]
    named = {(e["pid"], e["name"]): e["args"] for e in events if e["name"].startswith("process_")}
    assert named[1, "process_name"] == {"name": "rank 1"}
    assert named[1, "process_sort_index"] == {"sort_index": 1}


@pytest.mark.parametrize(
    ("arrivals", "own", "ahead"),
    [
        ([1.0, 2.0, 3.0], [11.0, 12.5, 13.0], 10.0),
        ([1.0, 2.0, 3.0], [13.0], 10.0),
        ([], [7.0], 0.0),
        ([3.0], [1.0, 13.0], 10.0),
    ],
)
def test_clocks_differ_by_the_median_of_the_last_arrivals(written, arrivals, own, ahead):
    first = OfProcess("rank 0", [0], [Span(STEPS, "step", 4.0, 5.0, {})], arrivals)
    second = OfProcess("rank 1", [1], [Span(STEPS, "step", 14.0, 15.0, {})], own)
    ((_, began, _, _),) = tracks(written(first, OfProcess.decode(second.encode())), 1)["worker 1"]
    assert began == pytest.approx(1e6 * (10 - ahead))


def test_a_trace_without_steps_is_a_file_of_tracks(written):
    assert {event["ph"] for event in written(OfProcess("rank 0", [0], [], []))} == {"M"}
