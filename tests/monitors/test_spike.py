"""Spikes, and steps that a driver skips because of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.html_report.command import report as command
from adaptive.runtime.local_world import LocalWorld

from .lockstep import Lockstep, graph, operators, reading


def spikes(values, **options):
    """The numbers of the values that are spikes."""
    program = Lockstep(lambda x: mon.spike(x, **options))
    return [i for i, v in enumerate(values) if program.step([(v,)], [reading()])[0]]


def noise(count, seed=0):
    return np.random.default_rng(seed).normal(3, 0.1, count).astype(np.float32)


def test_a_value_far_above_the_median_of_its_window_is_a_spike():
    values = noise(60)
    values[[3, 7, 30, 40, 50]] = 1e30, 3.4e38, 1e30, 3.3, -1e30
    assert spikes(values, window=16.0) == [30]
    falling = np.float32([8, 7, 6, 5, 4, 3, 2, 1, 7.7])  # the limit is 4.5 + 1.4826 * 2 = 7.47
    assert spikes(falling, window=8, factor=1.0) == [8]
    early = [*noise(7), np.float32(9), np.float32(9)]  # the first has only seven before it
    assert spikes(early, window=16) == [8]
    expected = []
    for i in range(8, 60):
        last = values[max(i - 16, 0) : i].astype(float)
        middle = np.median(last)
        if values[i] > middle + 3 * 1.4826 * np.median(abs(last - middle)):
            expected.append(i)
    assert spikes(values, window=16, factor=3.0) == expected


def test_values_that_are_not_finite_are_spikes_and_leave_the_window_as_it_was():
    values, bad = noise(40), [0, 5, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
    values[bad] = [np.nan, np.inf, -np.inf, *[np.nan] * 9]
    values[31] = 4  # after more of them than the window holds
    assert spikes(values, window=8) == [*bad, 31]


def test_a_new_level_is_accepted_when_it_fills_half_of_the_window():
    assert spikes(np.concatenate([noise(20), 50 + noise(20)]), window=16) == list(range(20, 28))


def test_rounding_is_no_spike():
    ulp = np.float32(2.0**-22)  # of numbers from 2 to 4
    assert spikes(np.float32([3.0] * 12 + [3 + 2 * ulp, 3 + 40 * ulp]), window=8) == [13]
    assert spikes([jnp.bfloat16(v) for v in [3.0] * 12 + [3.0625, 3.5]], window=8) == [13]
    assert spikes([jnp.int32(3)] * 12 + [jnp.int32(4)], window=8) == [12]
    assert spikes(np.zeros(12, np.float32), window=8) == []


def test_losses_that_are_zero_in_most_steps_are_no_spikes_elsewhere():
    """Their median absolute deviation is 0."""
    values = np.tile(np.float32([0, 0, 0, 1, 0]), 12)
    values[[43, 48]] = 1e9, 12
    assert spikes(values, window=20) == [43]


def test_it_is_one_array_of_state_and_no_message():
    assert operators(graph(lambda x: mon.spike(x), 1.0)) == ["state spike"]
    assert mon.spike(jnp.nan)  # outside a program
    assert not mon.spike(3.0)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (np.ones(2), {}, r"expected one real number, got float\d\d\[2\]"),
        (1j, {}, "expected one real number, got complex"),
        (1.0, {"window": 7}, "window=7"),
        (1.0, {"factor": float("nan")}, "factor=nan"),
    ],
)
def test_what_is_no_value_is_refused(value, options, message):
    with pytest.raises(ad.CollectiveError, match=rf"spike \(test_spike.py:\d+\): {message}"):
        mon.spike(value, **options)


def test_a_value_of_one_worker_is_refused():
    def driver(w, batch):
        return w, {"spike": mon.spike(batch["x"].mean())}

    with pytest.raises(ad.CollectiveError, match=r"spike.*\n*.*comm.all_reduce"):
        ad.Program(driver, jnp.zeros(()), {"x": np.ones(16, np.float32)}, global_batch=4, world=LocalWorld(2))


def test_a_step_that_keeps_its_state_is_counted_as_skipped(tmp_path):
    """Also a restored program knows the window, and overflows count with nonfinite="allow"."""
    x = np.tile(np.float32([1, 2, 3, 4]), 10)
    x[28], x[33] = 1e6, np.inf  # in steps 15 and 17 of two examples
    record = tmp_path / "run.jsonl"

    def driver(w, batch):
        loss = comm.all_reduce(jnp.mean(batch["x"]))
        spike = mon.spike(loss, window=8)
        new = jax.tree.map(lambda old, new: jnp.where(spike, old, new), w, w + loss)
        return new, {"loss": loss, "skipped": spike}

    def program():
        options = {"global_batch": 2, "world": LocalWorld(2), "resizable": False, "nonfinite": "allow"}
        return ad.Program(driver, jnp.zeros(()), ad.data.from_iterator(lambda: ({"x": v} for v in x)), **options)

    with program() as first, program() as second:
        for _ in first.run(steps=12, record=record):
            pass
        second.restore(first.checkpoint())
        states = [float(second.state)]
        for report in second.run(steps=6, record=record):
            states.append(float(second.state))
            assert not report.skipped  # the step is committed, with the state as it was
    assert np.flatnonzero(np.diff(states) == 0).tolist() == [2, 4]
    steps = ad.log.read(record)
    assert steps["step"][steps["skipped"]].tolist() == [15, 17]
    CliRunner().invoke(command, [str(record)], catch_exceptions=False)
    page = record.with_suffix(".html").read_text()
    assert "skipped steps" in page
    assert "the driver kept its state" in page
    assert "metric-skipped" not in page
