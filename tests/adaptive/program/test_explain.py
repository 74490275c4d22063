"""The text of a plan: segments, messages with their bytes, and the driver's lines."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive.control.status import status_length
from adaptive.program.explain import explain_plan
from adaptive.runtime.message import lay_out_all
from tests.adaptive.drivers import FEATURES, Recorder, mean_loss, planned, pointed_at

W = {"bias": jnp.zeros(()), "kernel": jnp.zeros(FEATURES)}


def loss_of(params, batch):
    return mean_loss(params["kernel"], batch) + params["bias"] ** 2


def driver(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state, batch)
    average = comm.all_reduce(grads)
    seconds = comm.all_gather(mon.compute_seconds())
    smooth = mon.ema(comm.all_reduce(loss))
    operators.hook("adapt", Recorder(), (smooth, seconds), every=20)
    operators.hook("log", Recorder(), (smooth,))
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, average), {}


def text_of(driver, state=W, batch_sizes=(4, 4), shards=()):
    workers = len(batch_sizes)
    plan = planned(driver, state, workers=workers)
    layouts = lay_out_all(plan.messages, capacity=workers, status=status_length(workers))
    return explain_plan(plan, layouts, batch_sizes, shards), layouts


def row(text, start):
    (line,) = [line for line in text.splitlines() if re.match(start, line)]
    return line


def test_it_opens_with_the_driver_and_the_split():
    text, _ = text_of(driver, batch_sizes=(5, 2, 9))
    first, second = text.splitlines()[:2]
    assert first.startswith("driver 'driver': ")
    assert first.endswith("2 leaves of state")
    assert second == "3 workers, global batch 16 = 5 + 2 + 9"


def test_a_message_lists_its_contents_with_lines_and_bytes_that_add_up():
    text, (layout,) = text_of(driver)
    head = row(text, "message 1")
    assert head == f"message 1  {layout.nbytes} B from each worker, 1 buffer"
    assert re.match(r" +mean +2 leaves +16 B +\['bias'\] … \(test_explain.py:\d+\)", row(text, r" +mean +2"))
    assert re.match(r" +gather +1 leaf +8 B +a value \(test_explain.py:\d+\)", row(text, " +gather"))
    assert re.match(r" +mean +1 leaf +4 B +a value", row(text, r" +mean +1"))
    bytes_of_rows = [int(b) for b in re.findall(r"^    \w.* (\d+) B ", text, re.MULTILINE)]
    assert sum(bytes_of_rows) == layout.nbytes == 4 * (4 + 1 + 2 + 1 + status_length(2))
    lines = pointed_at(RuntimeError(text))
    assert "average = comm.all_reduce(grads)" in lines
    assert "seconds = comm.all_gather(mon.compute_seconds())" in lines


def test_hooks_slots_and_sources_are_named():
    text, _ = text_of(driver)
    assert re.match(
        r"hook     'adapt' every 20 steps \(test_explain.py:\d+\), reads 2 values", row(text, "hook +'adapt'")
    )
    assert re.match(r"hook     'log' every step \(test_explain.py:\d+\), reads 1 value$", row(text, "hook +'log'"))
    assert re.match(r"state    ema/0 \(test_explain.py:\d+\): 2 numbers$", row(text, "state   "))
    assert row(text, "sources") == "sources  compute_seconds"


def test_the_plan_says_whether_a_batch_can_be_split_and_why_not():
    assert "may run as several microbatches" in text_of(driver)[0].splitlines()[-1]

    def gathering(state, batch):
        return state, {"rows": comm.all_gather(batch["y"].mean())}

    last = text_of(gathering)[0].splitlines()[-1]
    assert "every new size is compiled: all_gather (test_explain.py:" in last


def test_shards_are_listed():
    text, _ = text_of(driver, shards=(30, 20))
    assert "each worker has its own data: 50 examples = 30 + 20" in text
