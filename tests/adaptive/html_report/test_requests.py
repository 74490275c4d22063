"""Causes of new sizes in a record: a hook, the script, a checkpoint, leaving workers."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.html_report.columns import read_columns
from adaptive.html_report.events import run_events
from adaptive.runtime.local_world import LocalWorld

DATA = {"x": np.arange(480, dtype=np.float32)}


def grow(control):
    if control.step == 4:
        control.rescale(global_batch=32)


def set_rate(control):
    control.set_hyperparameters(lr=0.5)


def driver(state, batch):
    rate = ad.hyperparameter("lr", 0.1)
    ctrl.hook(grow, every=4)
    ctrl.hook(set_rate, every=4)
    return state + rate * comm.all_reduce(batch["x"].mean()), {}


@pytest.fixture
def reasons(tmp_path):
    """The reasons for other batch sizes in a run, by step. `between(program, step)` is called after each."""

    def reasons(between, world):
        path = tmp_path / "run.jsonl"
        with ad.Program(driver, jnp.zeros(()), DATA, global_batch=24, world=world, deterministic=True) as program:
            for report in program.run(steps=12, record=path):
                between(program, report.step)
        reasons.changes = run_events(read_columns(path))[0]
        return {int(c.row) + 1: c.why for c in reasons.changes if c.kind == "size"}

    return reasons


def test_a_hook_and_then_the_script(reasons):
    def between(program, step):
        if step == 7:
            program.rescale(global_batch=24)

    assert reasons(between, LocalWorld(2)) == {
        5: "grow, after step 4: a global batch of 32",
        8: "program.rescale, after step 7: a global batch of 24",
    }


def test_a_worker_that_leaves_beside_a_hooks_request(reasons):
    def between(program, step):
        if step == 4:
            program.rescale(workers=2)

    assert reasons(between, LocalWorld(3)) == {5: "grow, after step 4: a global batch of 32; worker 2 left"}


def test_a_checkpoint(reasons):
    kept = {}

    def between(program, step):
        if step == 2:
            kept[2] = program.checkpoint()
        elif step == 6 and kept:
            program.restore(kept.pop(2))

    assert reasons(between, LocalWorld(2)) == {5: "grow, after step 4: a global batch of 32"}
    (restored,) = (change for change in reasons.changes if change.kind == "restored")
    assert (restored.row, restored.what) == (2, "Restored at step 2")
    assert restored.why == "4 steps discarded"


def test_a_note_names_the_hook_of_an_impossible_request(tmp_path):
    def greedy(control):
        control.rescale(global_batch=10**6)

    def driver(state, batch):
        rate = ad.hyperparameter("lr", 0.1)
        ctrl.hook(greedy)
        ctrl.hook(set_rate)
        return state + rate * comm.all_reduce(batch["x"].mean()), {}

    with ad.Program(driver, jnp.zeros(()), DATA, global_batch=24, world=LocalWorld(2)) as program:
        (report,) = program.run(steps=1, record=tmp_path / "run.jsonl")
    (note,) = report.notes
    assert note.startswith("hook 'greedy': global batch 1000000 clipped")
    line = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])
    assert line["decision"]["requests"] == [
        {"hook": "greedy", "step": 1, "global_batch": 10**6},
        {"hook": "set_rate", "step": 1, "hyperparameters": {"lr": 0.5}},
    ]
