"""A policy of a program asks for a probe of links and lets a worker leave; the record and the report say so."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.html_report.columns import read_columns
from adaptive.html_report.events import hook_summary, run_events
from adaptive.html_report.requests import wish_in_words
from adaptive.runtime.local_world import LocalWorld

COVERS = ("adaptive/control/decisions.py", "adaptive/control/membership.py", "adaptive/html_report/requests.py")

DATA = {"x": np.arange(480, dtype=np.float32)}


def test_a_probe_and_a_worker_that_leaves(tmp_path):
    seen, path = [], tmp_path / "run.jsonl"

    def update(observation, state):
        seen.append((observation.step, observation.due, observation.links))
        if observation.step == 4:
            return ad.Decision(probe=True), state
        if observation.step == 5:
            return ad.Decision(leave=(1,), notes=("it is slow",)), state
        return None, state

    def driver(state, batch):
        ctrl.hook(ctrl.Policy(lambda n: (), update, "swap"), every=4)
        return state + comm.all_reduce(batch["x"].mean()), {}

    with ad.Program(driver, jnp.zeros(()), DATA, global_batch=24, world=LocalWorld(3), deterministic=True) as program:
        reports = list(program.run(steps=8, record=path))
    assert [(step, due) for step, due, _ in seen] == [(step, step in (4, 5, 8)) for step in range(1, 9)]
    links = [links for _, _, links in seen]
    assert links[:4] == [None] * 4
    assert (links[4].hosts, links[4].step, links[4].host_of.tolist()) == ((), 4, [-1] * 3)
    assert [report.members for report in reports[4:6]] == [(0, 1, 2), (0, 2)]
    assert [report.global_batch for report in reports] == [24] * 8
    assert reports[4].notes == ("it is slow",)
    assert "worker slot 1 is empty: its worker has left." in reports[5].notes
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    requests = {line["step"]: line["decision"]["requests"] for line in lines if line.get("decision")}
    assert requests == {4: [{"hook": "swap", "step": 4, "probe": True}], 5: [{"hook": "swap", "step": 5, "leave": [1]}]}
    assert [wish_in_words(request) for (request,) in requests.values()] == ["a probe of links", "worker 1 to leave"]
    run = read_columns(path)
    assert hook_summary(run) == ["swap made 2 requests, 1 of them for a change."]
    assert [event.kind for event in run_events(run)[0]].count("left") == 1
