"""A recorded run: replayed with its policy, and as a report."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
from click.testing import CliRunner

import adaptive as ad
import collectives as comm
import controllers as ctrl
from controllers.simulate import read_trace, replay
from launchers import command

from .problem import DATA, START, descend


def test_a_recorded_run_is_replayed_to_its_decisions_and_has_a_report(devices, tmp_path):
    """A policy changes the split, and a schedule the batch."""

    def driver(w, batch):
        slowness = jnp.asarray([1e-3, 2e-3, 4e-3], jnp.float64)[ad.worker_index()]
        seconds = comm.all_gather(slowness * ad.batch_size().astype(jnp.float64))
        ctrl.hook(ctrl.schedule({0: 21, 20: 42}))
        ctrl.hook(ctrl.published.lb_bsp(ctrl.published.moving_average()), seconds, every=5)
        return descend(w, batch)

    path, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    with ad.Program(driver, START, DATA, global_batch=21, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=40, record=path))
    run = read_trace(path)
    hook = next(name for name in run.hooks if "lb_bsp" in name)
    replayed = replay(ctrl.published.lb_bsp(ctrl.published.moving_average()), run, hook=hook)
    decided = [(report.step, report.decision.shares) for report in reports if report.decision]
    assert [(step, decision.shares) for step, decision in replayed] == [row for row in decided if row[1]] != []
    np.testing.assert_array_equal(run.sizes, [report.batch_sizes for report in reports])

    done = CliRunner().invoke(command.adaptive, ["report", str(path), "-o", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert not re.search(r"""<(script|link|img|iframe)[^>]+(src|href)=["']?https?:""", text)  # loads nothing
    visible = re.sub(r"(?s)<(script|style).*?</\1>", "", text)
    assert re.search(r"\b20\b|\b21\b", visible)  # the step of the change
    for word in ("schedule", "lb_bsp", "loss", "42"):
        assert word in visible
