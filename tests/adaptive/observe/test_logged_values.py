"""`program.log` and `program.evaluate(log=…)`: values of the script reach every log, with the step."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import adaptive as ad
import collectives as comm
from adaptive.html_report.command import report as command
from adaptive.html_report.formatting import number
from adaptive.observe.sinks import SinkThread
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data
from tests.adaptive.event_files import scalars


def driver(state, batch):
    mean = comm.all_reduce(batch["y"].mean())
    return state + mean, {"loss": mean**2}


def evaluation(state, batch):
    return {"loss": jnp.mean((batch["y"] - state) ** 2), "counts": jnp.ones(3)}


@pytest.fixture(scope="module")
def program():
    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=comm.SoloWorld(), resizable=False) as program:
        program.step()
        yield program


def test_values_reach_all_logs_with_the_step_after_which_they_were_logged(program, tmp_path, capsys):
    record, table, board, first = (*(tmp_path / name for name in ("run.jsonl", "run.csv", "board")), program.steps)
    log, found = [ad.log.CSV(table, columns=["val.loss", "late"]), ad.log.TensorBoard(board)], []
    for report in program.run(steps=6, record=record, log=log, progress=True):
        if report.step % 3 == first % 3:
            validated = program.evaluate(evaluation, make_data(10), log="val")
            found.append(float(validated["loss"]))
    program.log(late=jnp.float32(0.5))  # after the run
    expected = dict(zip((first + 3, first + 6), found, strict=True))
    steps = ad.log.read(record)
    assert {int(s): x for s, x in zip(steps["step"], steps["val.loss"], strict=True) if x == x} == expected
    assert np.flatnonzero(steps["late"] == steps["late"]).tolist() == [5]
    assert (steps.logged, steps["restores"].any()) == (["val.loss", "late"], False)
    assert dict(scalars(board, "val.loss")) == pytest.approx(expected)
    assert [step for step, _ in scalars(board, "loss")] == list(range(first + 1, first + 7))
    rows = {int(row["step"]): row for row in csv.DictReader(io.StringIO(table.read_text()))}
    assert {step: float(row["val.loss"]) for step, row in rows.items() if row["val.loss"]} == expected
    assert rows[first + 6]["late"] == "0.5"
    assert rows[first + 6]["loss"]
    printed = capsys.readouterr().err
    assert f"step {first + 3}  val.loss {found[0]:.4g}" in printed
    CliRunner().invoke(command, [str(record)], catch_exceptions=False)
    page = record.with_suffix(".html").read_text()
    assert f"<dt>val.loss</dt><dd>{number(found[-1])} " in page
    assert "metric-loss" in page
    assert "metric-val.loss" not in page  # it is drawn beside the loss
    assert "metric-late" in page


def test_values_before_the_first_step_go_with_it(tmp_path):
    record = tmp_path / "run.jsonl"
    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(), resizable=False) as program:
        program.log(before=2.0)
        list(program.run(steps=2, record=record))
    assert ad.log.read(record)["before"][0] == 2.0


def test_a_result_is_logged_by_a_name(program):
    with pytest.raises(ad.DriverError, match='log= is a name for the result, such as "val"; got True'):
        program.evaluate(evaluation, make_data(10), log=True)


@pytest.mark.parametrize(
    ("values", "why"), [({"val": np.ones(3)}, "val has no single number"), ({"loss": 1.0}, "'loss' is a value of")]
)
def test_values_that_cannot_be_logged_are_refused(program, tmp_path, values, why):
    for _ in program.run(steps=1, log=ad.log.CSV(tmp_path / "run.csv")):
        with pytest.raises(ad.DriverError, match=why):
            program.log(**values)


def test_a_value_after_the_first_step_of_a_restore_is_no_second_restore(tmp_path):
    thread = SinkThread([ad.log.JSONL(tmp_path / "run.jsonl")], LocalWorld(2))
    for each in (event(1), event(2), replace(event(2), restored=True)):
        thread(each)
    thread.log({"val": 3.0}, 2)
    thread.close()
    found = ad.log.read(tmp_path / "run.jsonl")
    assert (found["restores"].tolist(), found["repeated"].tolist(), found["val"][1]) == ([0, 1], [0, 1], 3.0)
