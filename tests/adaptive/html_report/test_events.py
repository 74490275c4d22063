"""What changed, with whose decision it was."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from adaptive.html_report.columns import read_columns
from adaptive.html_report.events import hook_summary, run_events, sizes_in_words
from adaptive.html_report.requests import asks_for_more, wish_in_words

from .made_up import record

BUSY = np.full((40, 2), 0.02)


@pytest.fixture
def listed(tmp_path):
    def listed(busy=BUSY, **options):
        run = read_columns(record(tmp_path / "run.jsonl", busy, **options))
        return [(int(run.step[c.row]), c.what, c.why) for c in run_events(run)[0]], hook_summary(run)

    return listed


def asked(**fields):
    """A decision, and what had been asked for before it."""
    decision = {"global_batch": None, "shares": None, "stop": False, "workers": None, "by": ["adapt"], **fields}
    return {"decision": decision, "asked": {"global_batch": 64, "active": [0, 1], "workers": [2, 1, 2]}}


def test_nothing_changed(listed):
    assert listed() == ([], ["adapt made no request in 4 calls."])


GROWN = np.repeat([[32, 32], [64, 48]], [12, 28], axis=0)
GROW = {"hook": "adapt", "step": 10, "global_batch": 112}
RESCALE = {"script": "program.rescale", "step": 20, "global_batch": 64}


LOST = {"lost": ["worker 1 lost: rank 1 disconnected"]}


def test_a_change_follows_the_last_request(listed):
    lines, _ = listed(sizes=GROWN, fields={10: asked(global_batch=112)})
    assert lines == [
        (13, "Batch sizes: 32 + 32 = 64 → 64 + 48 = 112", "adapt, after step 10: a global batch of 112"),
    ]


def test_requests_of_the_script_are_not_attributed_to_a_hook(listed):
    sizes = np.repeat([[32, 32], [64, 48], [32, 32]], [12, 8, 20], axis=0)
    lines, _ = listed(sizes=sizes, fields={10: asked(global_batch=112), 21: {"script": [RESCALE]}})
    assert [why for *_, why in lines] == [
        "adapt, after step 10: a global batch of 112",
        "program.rescale, after step 20: a global batch of 64",
    ]


def test_a_loss_before_a_request_is_carried_out_does_not_hide_it(listed):
    busy = np.full((40, 2), 0.02)
    busy[12:, 1] = np.nan
    sizes = np.repeat([[32, 32], [112, 0]], [12, 28], axis=0)
    lines, _ = listed(busy, sizes=sizes, fields={10: asked(global_batch=112), 13: LOST})
    assert lines[-1][2] == "adapt, after step 10: a global batch of 112; worker 1 lost"


def test_hooks_that_asked_for_other_things_in_the_same_step_are_no_reason(listed):
    decision = asked(global_batch=112, stop=True, by=["adapt", "plateau", "enough"])
    decision["decision"]["requests"] = [
        GROW,
        {"hook": "plateau", "step": 10, "hyperparameters": {"lr": 0.5}},
        {"hook": "enough", "step": 10, "stop": True},
    ]
    lines, hooks = listed(sizes=GROWN, fields={10: decision})
    assert [why for *_, why in lines] == ["enough asked for it", "adapt, after step 10: a global batch of 112"]
    assert hooks == [f"{by} made 1 request." for by in ("adapt", "plateau", "enough")]


def test_pending_requests_of_the_script_are_listed_at_the_end(listed):
    request = {"script": "program.rescale", "step": 35, "global_batch": 112}
    lines, _ = listed(fields={35: {"asked": asked()["asked"]}, 36: {"script": [request]}})
    assert lines == [(35, "Request for, and not there by the end: a global batch of 112", "program.rescale")]


def test_the_first_request_of_several_is_carried_out(listed):
    fields = {10: asked(global_batch=112, shares=[4.0, 3.0]), 20: asked(global_batch=64), 30: asked(global_batch=64)}
    lines, hooks = listed(sizes=GROWN, fields=fields)
    what, why = (
        "Batch sizes: 32 + 32 = 64 → 64 + 48 = 112",
        "adapt, after step 10: a global batch of 112 and a split of 57 % : 43 %",
    )
    assert lines == [(13, what, why)]
    assert hooks == ["adapt made 3 requests, 1 of them for a change."]


def test_an_older_record_has_a_decision_carried_out_once(listed):
    sizes = np.repeat([[32, 32], [64, 48], [32, 32]], [12, 8, 20], axis=0)
    lines, _ = listed(sizes=sizes, fields={10: asked(global_batch=112)})
    assert lines[1][2] == ""


def test_an_older_record_leaves_open_whether_a_loss_or_a_hook_changed_sizes(listed):
    lost = {"lost": ["worker 1 lost: rank 1 disconnected"]}
    lines, _ = listed(sizes=GROWN, fields={10: asked(global_batch=112), 13: lost})
    assert lines[-1][2] == "adapt, after step 10: a global batch of 112; worker 1 lost"


def test_a_change_that_no_hook_asked_for(listed):
    ((_, _, why),), _ = listed(sizes=np.repeat([[32, 32], [64, 48]], [12, 28], axis=0))
    assert why == ""


def test_joining_and_leaving_workers_are_listed(listed):
    busy = np.full((40, 3), 0.02)
    busy[:10, 1], busy[20:, 2], busy[30:, 1] = np.nan, np.nan, np.nan
    lost = "worker 2 lost: rank 2 (pid 7 on node) disconnected in message 1 of step 21; 3 ms to repair."
    lines, _ = listed(
        busy,
        fields={
            11: {"joined": [1], "notes": ["a worker has joined in worker slot 1."]},
            21: {"lost": [lost], "notes": [lost]},
        },
    )
    assert [(step, what) for step, what, _ in lines if "Batch" not in what] == [
        (11, "Worker 1 joined"),
        (21, "W" + lost[1:]),
        (31, "Worker 1 left"),
    ]
    assert [why for _, what, why in lines if "Batch" in what] == ["worker 1 joined", "worker 2 lost", "worker 1 left"]


def test_skipped_steps_beside_one_another_are_one_line_with_why(listed):
    why = "skipped: all_reduce brought NaN from worker 1"
    fields = {step: {"skipped": True, "notes": [why]} for step in (5, 6, 7, 30)}
    assert listed(fields=fields)[0] == [(5, "3 steps skipped, up to step 7", why), (30, "1 step skipped", why)]


def test_a_note_of_another_thing_is_no_reason_for_a_skipped_step(listed):
    why, other = "skipped: all_reduce brought NaN from worker 1", "the checkpoint could not be written: no space"
    lines, _ = listed(fields={5: {"skipped": True, "notes": [other, why]}})
    assert lines == [(5, other[0].upper() + other[1:], ""), (5, "1 step skipped", why)]


def test_many_skipped_steps_are_one_line(listed):
    fields = {step: {"skipped": True} for step in range(2, 40, 3)}
    assert listed(fields=fields)[0] == [(2, "13 steps skipped, one here and one there, up to step 38", "")]


def test_notes_and_the_end_are_listed(listed):
    fields = {7: {"notes": ["the checkpoint could not be written: no space"]}, 40: asked(stop=True)}
    expected = [
        (7, "The checkpoint could not be written: no space", ""),
        (40, "Stop of the run", "adapt asked for it"),
    ]
    assert listed(fields=fields)[0] == expected


def test_requests_not_in_force_at_the_end_are_listed(listed):
    assert listed(fields={30: asked(global_batch=128)})[0] == [
        (30, "Request for, and not there by the end: a global batch of 128", "adapt")
    ]


def test_many_adjustments_of_the_split_are_one_line(listed):
    sizes = np.array([[32 + t // 5, 32 - t // 5] for t in range(40)])
    fields = {t: asked(shares=[float(s) for s in sizes[t]]) for t in range(5, 40, 5)}
    ((step, what, why),), _ = listed(sizes=sizes, fields=fields)
    assert (step, why) == (6, "adapt")
    assert what.startswith(
        "Batch sizes: 7 changes up to step 36, of the split alone; in the largest, in step 6, 1 example moved"
    )
    assert what.endswith("32 + 32 = 64 → 39 + 25 = 64")


def test_changes_of_the_global_batch_are_one_line_with_its_way(listed):
    sizes = np.array([[32 * (1 + t // 8)] * 2 for t in range(40)])
    fields = {t: asked(global_batch=int(sizes[t].sum())) for t in range(8, 40, 8)}
    ((_, what, _),), _ = listed(sizes=sizes, fields=fields)
    assert "64 → 128 → 192 → 256 → 320; in the end 160 + 160 = 320" in what


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        (11, "64 → 128 → 192 → 256 → 320 → 384 → 448 → 512 → 576 → 640 → 704 → 768; in the end"),
        (13, "64 → 128 → 192 → 256 → 320 → 384 → … → 640 → 704 → 768 → 832 → 896; in the end"),
    ],
)
def test_the_way_of_the_global_batch_is_shortened_in_its_middle(changes, way, listed):
    sizes = np.array([[32 * (1 + min(t // 2, changes))] * 2 for t in range(40)])
    fields = {t: asked(global_batch=int(sizes[t].sum())) for t in range(2, 2 * changes + 2, 2)}
    ((_, what, _),), _ = listed(sizes=sizes, fields=fields)
    assert way in what


def test_sizes_of_many_workers_are_given_by_their_range(listed):
    sizes = np.repeat([[32] * 20, [*range(30, 40), *range(30, 40)]], 20, axis=0)
    ((_, what, _),), _ = listed(np.full((40, 20), 0.02), sizes=sizes)
    assert what == "Batch sizes: 640 = 20 workers of 32 → 690 = 20 workers of 30 to 39"


def test_a_list_without_end_is_cut_at_the_least_important(tmp_path):
    fields = {t: {"notes": [f"note {t}"]} for t in range(1, 400)} | {400: {"lost": ["worker 1 lost: gone"]}}
    lines, left_out = run_events(read_columns(record(tmp_path / "r", np.full((400, 2), 0.02), fields=fields)))
    assert (len(lines), left_out) == (300, 100)
    assert lines[-1].what == "Worker 1 lost: gone"


def test_a_hyperparameter_that_was_set_is_no_reason_for_sizes(listed):
    sizes = np.repeat([[32, 32], [64, 48]], [12, 28], axis=0)
    fields = {8: asked(global_batch=112), 10: asked(hyperparameters={"lr": 0.5}, by=["plateau"])}
    ((_, _, why),), hooks = listed(sizes=sizes, fields=fields)
    assert why == "adapt, after step 8: a global batch of 112"
    assert hooks == ["adapt made 1 request.", "plateau made 1 request."]


def test_a_hook_without_requests_is_listed_with_its_missing_values(listed):
    scale = np.full((40, 3), np.nan)
    assert listed(noise=scale)[1] == [
        "adapt made no request in 4 calls, 4 of them without measurements (its values were NaN)."
    ]
    assert listed(noise=np.ones((40, 3)))[1] == ["adapt made no request in 4 calls."]


def test_a_loss_is_listed_with_the_cost_of_its_step(listed):
    busy = np.full((40, 2), 0.02)
    busy[20] = 1.45
    lost = "worker 1 lost: rank 1 disconnected in message 1 of step 21; 0.4 ms to repair."
    lines, _ = listed(busy, fields={21: {"lost": [lost]}})
    ((row, what, why),) = lines
    assert (row, what) == (21, "W" + lost[1:])
    assert why == "step 21 took 1.45 s, repair and retry included; the median step took 20 ms"


# --- in words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({}, ""),
        ({"workers": 1, "stop": True}, "1 worker and the end"),
        ({"workers": 0}, "0 workers"),
        ({"global_batch": 2048, "shares": [1, 3]}, "a global batch of 2,048 and a split of 25 % : 75 %"),
        ({"shares": [1.0] * 8}, "a split of " + " : ".join(["12 %"] * 8)),
        ({"shares": [1.0] * 9}, "another split"),
        ({"shares": [0.0, 0.0]}, "another split"),
        ({"hyperparameters": {"lr": 0.5}}, "lr = 0.5"),
    ],
)
def test_a_request_in_words(wish, words):
    assert wish_in_words(wish) == words


@pytest.mark.parametrize(
    ("wish", "new"),
    [
        ({"global_batch": 64}, False),
        ({"global_batch": 65}, True),
        ({"workers": 2}, False),
        ({"workers": 3}, True),
        ({"global_batch": 64, "workers": 3}, True),
        ({"stop": True}, True),
        ({"shares": [1.0]}, True),
        ({"hyperparameters": {"lr": 1}}, True),
    ],
)
def test_a_request_is_for_a_change_if_it_differs_from_the_targets_before(wish, new):
    assert asks_for_more(wish, {"global_batch": 64, "workers": [2, 1, 2]}) is new


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([1064], "1,064"),
        ([64, 32, 0], "64 + 32 + – = 96"),
        ([8] * 8, " + ".join(["8"] * 8) + " = 64"),
        ([8] * 8 + [0], "64 = 8 workers of 8"),
        ([1000] + [2000] * 9, "19,000 = 10 workers of 1,000 to 2,000"),
        ([0] * 9, "none"),
    ],
)
def test_sizes_in_words(sizes, words):
    assert sizes_in_words(np.array(sizes)) == words


# --- what is folded, cut and ordered ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "lines"), [(3, 3), (4, 1)])
def test_four_adjustments_of_one_hook_in_a_row_share_a_line(listed, changes, lines):
    sizes = np.array([[32 + min(t // 5, changes), 32 - min(t // 5, changes)] for t in range(40)])
    fields = {5 * k: asked(shares=[1, 1], by=["balance"]) for k in range(1, changes + 1)}
    found, _ = listed(sizes=sizes, fields=fields)
    assert len(found) == lines
    assert found[0][2].startswith("balance")


def test_a_change_of_another_hook_before_many_does_not_split_their_line(listed):
    sizes = np.array([[32 + t // 5] * 2 for t in range(30)])
    fields = {5 * k: asked(workers=2, by=["a" if k == 1 else "b"]) for k in range(1, 6)}
    lines = [(step, why.partition(",")[0]) for step, _, why in listed(BUSY[:30], sizes=sizes, fields=fields)[0]]
    assert lines == [(6, "a"), (11, "b")]


def test_a_worker_that_leaves_first_is_listed(listed):
    busy = np.full((40, 2), 0.02)
    busy[20:, 1] = np.nan
    sizes = np.where(np.isfinite(busy), 32, 0)
    lines, _ = listed(busy, sizes=sizes, fields={})
    assert lines == [(21, "Worker 1 left", ""), (21, "Batch sizes: 32 + 32 = 64 → 32 + – = 32", "worker 1 left")]


def test_adjustments_of_two_hooks_or_with_another_cause_do_not_share_a_line(listed):
    sizes = np.array([[32 + t // 4] * 2 for t in range(40)])
    names: list[str | None] = ["a", "a", "a", "b", "b", "b", None, "b", "b"]
    fields = {4 * (k + 1): asked(shares=[1.0, 1.0], by=[name]) for k, name in enumerate(names) if name}
    fields[4 * (names.index(None) + 1) + 1] = LOST
    lines = [why for _, what, why in listed(sizes=sizes, fields=fields)[0] if what.startswith("Batch sizes")]
    assert [why.partition(",")[0] for why in lines] == [name or "worker 1 lost" for name in names]


def test_the_largest_of_many_adjustments_is_named(listed):
    first = np.array([32, 33, 40, 30, 31])[np.arange(40) // 8]
    fields = {8 * k: asked(shares=[1.0, 1.0], by=["balance"]) for k in range(1, 5)}
    ((step, what, why),), _ = listed(sizes=np.stack([first, 64 - first], 1), fields=fields)
    assert (step, why) == (9, "balance")
    assert what == (
        "Batch sizes: 4 changes up to step 33, of the split alone; in the largest, in step 25, 10 examples moved "
        "between workers (most: worker 0 40 → 30); 32 + 32 = 64 → 31 + 33 = 64"
    )


@pytest.mark.parametrize("n", [8, 9])
def test_a_split_of_many_workers_is_described_by_what_moved(listed, n):
    before = [32] * n
    after = [30, 35, *[32] * (n - 3), 31]
    ((_, what, _),), _ = listed(np.full((40, n), 0.02), sizes=np.repeat([before, after], 20, axis=0))
    moved = f"Batch sizes: 3 examples moved between workers (most: worker 1 32 → 35), of {32 * n}"
    assert (what == moved) == (n > 8)


def test_what_matters_most_stays_in_a_list_that_is_cut(tmp_path):
    busy, sizes = np.full((900, 2), 0.02), np.array([[32 + t // 5 % 2] * 2 for t in range(900)])
    fields = {t: {"notes": [f"note {t}"]} for t in range(1, 151)}
    fields[400] = {"joined": [1]}
    fields[500] = {"restores": 1, "repeated": 0}
    fields[600] = asked(stop=True)
    lines, left_out = run_events(read_columns(record(tmp_path / "r", busy, sizes=sizes, fields=fields)))
    assert Counter(line.kind for line in lines) == {"size": 179, "note": 118, "joined": 1, "restored": 1, "stop": 1}
    assert left_out == 32
    assert [line.row for line in lines] == sorted(line.row for line in lines)


def test_a_loss_stands_above_the_sizes_that_it_changed(listed):
    lines, _ = listed(sizes=GROWN, fields={13: LOST})
    assert [what.split(":")[0] for _, what, _ in lines] == ["Worker 1 lost", "Batch sizes"]


@pytest.mark.parametrize(("places", "lines"), [(4, 4), (5, 1)])
def test_skipped_steps_of_more_than_four_places_share_a_line(listed, places, lines):
    fields = {step + i: {"skipped": True} for step in range(2, 2 + 7 * places, 7) for i in range(2)}
    found, _ = listed(fields=fields)
    assert len(found) == lines
    assert found[0][1] == (
        "2 steps skipped, up to step 3" if lines > 1 else "10 steps skipped, in 5 places, up to step 31"
    )


def test_a_skipped_step_is_no_call_of_a_hook(listed):
    assert listed(fields={10: {"skipped": True}})[1] == ["adapt made no request in 3 calls."]


def test_a_hook_whose_values_came_late_is_listed_with_the_calls_without(listed):
    scale = np.ones((40, 3))
    scale[:25] = np.nan
    assert listed(noise=scale)[1][0].startswith("adapt made no request in 4 calls, 2 of them without measurements")


@pytest.mark.parametrize("step", [11, 12, 40])
def test_no_request_is_pending_if_sizes_changed_or_it_came_last(listed, step):
    """Or if it asks for what was asked for before."""
    lines, _ = listed(sizes=GROWN, fields={step: asked(global_batch=128)})
    assert not any("Request" in what for _, what, _ in lines)
    assert listed(fields={30: asked(global_batch=64)})[0] == []


def test_several_restores_at_a_step_share_a_line(listed):
    fields = {5: {"restores": 2, "repeated": 3}, 9: {"restores": 1, "repeated": 0}}
    assert listed(fields=fields)[0] == [
        (5, "Restored 2 times at step 4", "3 steps discarded"),
        (9, "Restored at step 8", ""),
    ]
