"""What changed, with whose decision it was."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive.page.changes import changes, decided
from adaptive.page.columns import read_columns

from .made_up import record

BUSY = np.full((40, 2), 0.02)


@pytest.fixture
def listed(tmp_path):
    def listed(busy=BUSY, **options):
        run = read_columns(record(tmp_path / "run.jsonl", busy, **options))
        return [(int(run.step[c.row]), c.what, c.why) for c in changes(run)[0]], decided(run)

    return listed


def asked(**fields):
    """A decision, and what had been asked for before it."""
    decision = {"global_batch": None, "shares": None, "stop": False, "workers": None, "by": ["adapt"], **fields}
    return {"decision": decision, "asked": {"global_batch": 64, "active": [0, 1], "workers": [2, 1, 2]}}


def test_nothing_changed(listed):
    assert listed() == ([], [])


def test_a_decision_is_told_where_it_was_carried_out(listed):
    sizes = np.repeat([[32, 32], [64, 48]], [12, 28], axis=0)
    told = {10: asked(global_batch=112, shares=[4.0, 3.0]), 20: asked(global_batch=64), 30: asked(global_batch=64)}
    lines, hooks = listed(sizes=sizes, told=told)
    what, why = (
        "Batch sizes: 32 + 32 = 64 → 64 + 48 = 112",
        "adapt, behind step 10: a global batch of 112 and a split of 57 % : 43 %",
    )
    assert lines == [(13, what, why)]
    assert hooks == ["adapt asked for something 3 times, 1 of them for something else than there was."]


def test_an_older_record_names_the_hooks_that_were_due(listed):
    sizes = np.repeat([[32, 32], [64, 48]], [12, 28], axis=0)
    decision = {key: value for key, value in asked(global_batch=112)["decision"].items() if key != "by"}
    ((_, _, why),), _ = listed(sizes=sizes, told={10: {"decision": decision}}, version=2)
    assert why == "adapt, behind step 10: a global batch of 112"


def test_a_change_that_no_hook_asked_for(listed):
    ((_, _, why),), _ = listed(sizes=np.repeat([[32, 32], [64, 48]], [12, 28], axis=0))
    assert why == "asked for by the script, or by who is there"


def test_who_came_and_who_went(listed):
    busy = np.full((40, 3), 0.02)
    busy[:10, 1], busy[20:, 2], busy[30:, 1] = np.nan, np.nan, np.nan
    lost = "worker 2 lost: rank 2 (pid 7 on node) was gone in message 1 of step 21; 3 ms to repair."
    lines, _ = listed(
        busy,
        told={11: {"joined": [1], "notes": ["a worker has joined on seat 1."]}, 21: {"lost": [lost], "notes": [lost]}},
    )
    assert [(step, what) for step, what, _ in lines if "Batch" not in what] == [
        (11, "Worker 1 joined"),
        (21, "W" + lost[1:]),
        (31, "Worker 1 left"),
    ]
    assert [why for _, what, why in lines if "Batch" in what] == ["worker 1 joined", "worker 2 lost", "worker 1 left"]


def test_skipped_steps_beside_one_another_are_one_line_with_why(listed):
    why = "step skipped: all_reduce brought NaN from worker 1"
    told = {step: {"skipped": True, "notes": [why]} for step in (5, 6, 7, 30)}
    assert listed(told=told)[0] == [(5, "3 steps skipped, up to step 7", why), (30, "1 step skipped", why)]


def test_many_skipped_steps_are_one_line(listed):
    told = {step: {"skipped": True} for step in range(2, 40, 3)}
    assert listed(told=told)[0] == [(2, "13 steps skipped, one here and one there, up to step 38", "")]


def test_notes_and_the_end_are_told(listed):
    told = {7: {"notes": ["the checkpoint could not be written: no space"]}, 40: asked(stop=True)}
    expected = [
        (7, "The checkpoint could not be written: no space", ""),
        (40, "The end of the run", "adapt asked for it"),
    ]
    assert listed(told=told)[0] == expected


def test_what_is_not_there_by_the_end_is_told(listed):
    assert listed(told={30: asked(global_batch=128)})[0] == [
        (30, "Asked for, and not there by the end: a global batch of 128", "adapt")
    ]


def test_many_adjustments_of_the_split_are_one_line(listed):
    sizes = np.array([[32 + t // 5, 32 - t // 5] for t in range(40)])
    told = {t: asked(shares=[float(s) for s in sizes[t]]) for t in range(5, 40, 5)}
    ((step, what, why),), _ = listed(sizes=sizes, told=told)
    assert (step, why) == (6, "adapt")
    assert what.startswith(
        "Batch sizes: 7 changes up to step 36, of the split alone; in the largest, in step 6, 1 example moved"
    )
    assert what.endswith("32 + 32 = 64 → 39 + 25 = 64")


def test_changes_of_the_global_batch_are_one_line_with_its_way(listed):
    sizes = np.array([[32 * (1 + t // 8)] * 2 for t in range(40)])
    told = {t: asked(global_batch=int(sizes[t].sum())) for t in range(8, 40, 8)}
    ((_, what, _),), _ = listed(sizes=sizes, told=told)
    assert "64 → 128 → 192 → 256 → 320; in the end 160 + 160 = 320" in what


def test_of_many_workers_sizes_are_told_by_their_bounds(listed):
    sizes = np.repeat([[32] * 20, [*range(30, 40), *range(30, 40)]], 20, axis=0)
    ((_, what, _),), _ = listed(np.full((40, 20), 0.02), sizes=sizes)
    assert what == "Batch sizes: 640 = 20 workers of 32 → 690 = 20 workers of 30 to 39"


def test_a_list_without_end_is_cut_at_the_least_important(tmp_path):
    told = {t: {"notes": [f"note {t}"]} for t in range(1, 400)} | {400: {"lost": ["worker 1 lost: gone"]}}
    lines, left_out = changes(read_columns(record(tmp_path / "r", np.full((400, 2), 0.02), told=told)))
    assert (len(lines), left_out) == (300, 100)
    assert lines[-1].what == "Worker 1 lost: gone"


def test_a_hyperparameter_that_was_set_is_no_reason_for_sizes(listed):
    sizes = np.repeat([[32, 32], [64, 48]], [12, 28], axis=0)
    told = {8: asked(global_batch=112), 10: asked(hyperparameters={"lr": 0.5}, by=["plateau"])}
    ((_, _, why),), hooks = listed(sizes=sizes, told=told)
    assert why == "adapt, behind step 8: a global batch of 112"
    assert hooks == ["adapt asked for something 1 time.", "plateau asked for something 1 time."]
