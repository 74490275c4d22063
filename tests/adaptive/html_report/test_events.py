"""What changed, with whose decision it was."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.html_report.columns import Columns
from adaptive.html_report.events import hook_summary, run_events
from adaptive.runtime.local_world import LocalWorld

from .made_up import record

BUSY = np.full((40, 2), 0.02)
GROWN = np.repeat([[32, 32], [64, 48]], [12, 28], axis=0)
RESCALE = {"script": "program.rescale", "step": 20, "global_batch": 64}


@pytest.fixture
def listed(tmp_path):
    def listed(busy=BUSY, **options):
        run = Columns(record(tmp_path / "run.jsonl", busy, **options))
        return [(int(run.step[event.row]), event.text, event.why) for event in run_events(run)], hook_summary(run)

    return listed


def asked(by="adapt", **fields):
    """A decision of one hook."""
    return {"decision": {"requests": [{"hook": by, **fields}]}}


def test_nothing_changed(listed):
    assert listed() == ([], ["adapt never acted: no request in 4 calls."])


def test_a_change_follows_the_last_request_with_the_notes_of_its_step(listed):
    fields = {10: {**asked(global_batch=112), "notes": ["slowest worker expected at 3 ms"]}, 21: {"script": [RESCALE]}}
    sizes = np.repeat([[32, 32], [64, 48], [32, 32], [40, 24]], [12, 8, 10, 10], axis=0)
    lines, hooks = listed(sizes=sizes, fields=fields)
    assert lines == [
        (13, "Batch sizes: 32 + 32 = 64 → 64 + 48 = 112",
         "adapt, after step 10: a global batch of 112; slowest worker expected at 3 ms"),
        (21, "Batch sizes: 64 + 48 = 112 → 32 + 32 = 64", "program.rescale, after step 20: a global batch of 64"),
        (31, "Split: 32 + 32 = 64 → 40 + 24 = 64", ""),
    ]  # fmt: skip
    assert hooks == ["adapt made 1 request in 4 calls."]


def test_hooks_that_asked_for_other_things_in_the_same_step_are_no_reason(listed):
    requests = [{"hook": "adapt", "global_batch": 112}, {"hook": "plateau", "hyperparameters": {"lr": 0.5}}]
    fields = {step: {"hyperparameters": {"lr": 0.1 if step < 11 else 0.5, "b": [1]}} for step in range(1, 41)}
    fields[10]["decision"] = {"requests": [*requests, {"hook": "enough", "stop": True}]}
    assert listed(sizes=GROWN, fields=fields)[0] == [
        (10, "Stop of the run", "enough asked for it"),
        (11, "lr: 0.1 → 0.5", "plateau, after step 10: lr = 0.5"),
        (13, "Batch sizes: 32 + 32 = 64 → 64 + 48 = 112", "adapt, after step 10: a global batch of 112"),
    ]


def test_joining_leaving_and_lost_workers_are_listed_above_the_sizes_that_they_changed(listed):
    busy = np.full((40, 3), 0.02)
    busy[:10, 1], busy[20:, 2], busy[30:, 1] = np.nan, np.nan, np.nan
    busy[20, 0] = 1.45
    lost = "worker 2 lost: rank 2 (pid 7 on node) disconnected in message 1 of step 21; 3 ms to repair."
    joined = "a worker has joined in worker slot 1."
    fields = {11: {"joined": [1], "notes": [joined]}, 21: {"lost": [lost], "notes": [lost]}}
    lines, _ = listed(busy, fields=fields)
    assert [(step, what, why) for step, what, why in lines if "Batch" not in what] == [
        (11, "Worker 1 joined", joined),
        (21, "W" + lost[1:], "step 21 took 1.45 s, repair included; the median step took 20 ms"),
        (31, "Worker 1 left", ""),
    ]
    assert [what.split()[0] for _, what, _ in lines] == ["Worker", "Batch"] * 3


def test_skipped_steps_restores_and_notes_are_listed(listed):
    fields = {5: {"skipped": True, "notes": ["all_reduce brought NaN from worker 1"]}, 7: {"notes": ["no space left"]}}
    fields |= {9: {"restored": True}}
    fields |= {step: {"skipped": True, "notes": ["infinite loss"]} for step in range(31, 36)}
    lines, _ = listed(fields=fields)
    assert lines.pop() == (31, "Step skipped, 5 times up to step 35", "infinite loss")
    assert lines[:2] == [(5, "Step skipped", "all_reduce brought NaN from worker 1"), (7, "No space left", "")]
    assert [what for _, what, _ in lines[2:]] == ["Restored at step 8"]


@pytest.mark.parametrize(("changes", "lines"), [(3, 3), (4, 1)])
def test_four_changes_of_one_hook_share_a_line_beside_those_of_another(listed, changes, lines):
    sizes = np.array([[32 + min(t // 5, changes), 32 - min(t // 5, changes)] for t in range(40)])
    fields = {step: {"hyperparameters": {"lr": 0.1 if step < 18 else 0.2}} for step in range(1, 41)}
    for k in range(1, changes + 1):
        fields[5 * k] |= asked("balance", shares=[1, 1])
    found, _ = listed(sizes=sizes, fields=fields)
    assert len(found) == lines + 1
    if lines == 1:
        what = "Split, 4 times up to step 21: 32 + 32 = 64 → 36 + 28 = 64"
        assert found == [(6, what, "balance"), (18, "lr: 0.1 → 0.2", "")]


def test_changes_before_and_after_a_loss_do_not_share_a_line(listed):
    sizes = np.array([[32 + t // 4] * 2 for t in range(40)])
    fields = {4 * k: asked(global_batch=64 + 2 * k) for k in range(1, 10)} | {18: {"lost": ["worker 1 lost: gone"]}}
    assert [step for step, *_ in listed(sizes=sizes, fields=fields)[0]] == [5, 18, 21]


def test_a_hook_that_never_acted_has_a_reason(listed):
    """It was not due; the step was skipped; it had no measurements; or what the policy says."""
    assert listed(every=50)[1] == ["adapt never acted: it is called every 50 steps, and was not due."]
    assert listed(fields={10: {"skipped": True}})[1] == ["adapt never acted: no request in 3 calls."]
    assert listed(fields={30: asked(global_batch=128)})[1] == [
        "adapt made 1 request in 4 calls, but nothing has changed: its sizes have no kernels yet, or are those in use."
    ]
    scale = np.ones((40, 3))
    scale[:25] = np.nan
    why = {step: {"why": {"0/adapt": text}} for step, text in ((10, "no seconds are known"), (30, "gain below 2 %"))}
    assert listed(noise=scale, fields=why)[1] == [
        "adapt never acted: no request in 4 calls, in 2 of them without measurements (all values NaN). Gain below 2 %."
    ]


# --- a program's own record -------------------------------------------------------------------------------------------


def grow(control):
    if control.step == 4:
        control.rescale(global_batch=32)


def driver(state, batch):
    ctrl.hook(grow, every=4)
    return state + ad.hyperparameter("rates", np.ones(2)).sum() * comm.all_reduce(batch["x"].mean()), {}


def test_causes_in_the_record_of_a_program(tmp_path):
    """A hook beside a worker that leaves, a restore that repeats the hook's request, and the script."""
    path, data, kept = tmp_path / "run.jsonl", {"x": np.arange(480, dtype=np.float32)}, {}
    with ad.Program(driver, jnp.zeros(()), data, global_batch=24, world=LocalWorld(3), deterministic=True) as program:
        for report in program.run(steps=12, record=path):
            if report.step == 2:
                kept.setdefault(2, program.checkpoint())
            elif report.step == 6 and kept.get(2):
                program.restore(kept.pop(2))
                kept[2] = None
            elif report.step == 8:
                program.rescale(global_batch=24)
                program.set_hyperparameters(rates=[0.5, 0.25])
            elif report.step == 10:
                program.rescale(workers=2)
    run = Columns(path)
    events = run_events(run)
    assert events[-2].why  # the program's note on workers that leave
    assert [(int(run.step[event.row]), event.kind, event.by and event.why) for event in events] == [
        (3, "restored", ""),
        (5, "size", "grow, after step 4: a global batch of 32"),
        (9, "size", "program.rescale, after step 8: a global batch of 24"),
        (9, "hyperparameter", "program.set_hyperparameters, after step 8: rates = [0.5, 0.25]"),
        (11, "left", ""),
        (11, "size", "program.rescale, after step 10: 2 workers"),
    ]
