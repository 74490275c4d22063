"""`adaptive goodput`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from adaptive.html_report.goodput import as_table, goodput_command, in_words, windows
from adaptive.observe.ledger import CAUSES, Ledger
from tests.adaptive.html_report.made_up import record, uneven

PARTS = ("input", "computing", "exchanging", "waiting", "hooks", "compiling", "other")


@pytest.fixture
def run(tmp_path):
    """A run of 100 steps of a minute, of which the first 20 wait for input half of the time."""
    path = tmp_path / "run.jsonl"
    lines = [{"kind": "header", "version": 3, "run_id": "a", "workers": 1, "breakdown": PARTS}]
    for step in range(1, 101):
        parts = {"input": 30.0, "computing": 30.0} if step <= 20 else {"computing": 60.0}
        breakdown = [parts.get(name, 0.0) for name in PARTS]
        lines.append({"kind": "step", "step": step, "at": 1e9 + 60 * step, "batch_sizes": [4], "breakdown": breakdown})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_prints_causes_over_the_run_the_last_hour_and_the_worst(run):
    done = CliRunner().invoke(goodput_command, [str(run)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "run.jsonl: 1 h 40 min, 100 steps, 0 starts"
    assert lines[2].split("  ")[-1].strip() == "worst 1 h 0 min"
    row = next(line for line in lines if line.startswith("computing"))
    assert row.split()[1:8] == ["1", "h", "30", "min", "90", "%", "1"]
    assert next(line for line in lines if line.startswith("goodput")).split()[1:] == ["90", "%", "100", "%", "83", "%"]
    assert not any(line.startswith("unaccounted") for line in lines)


def test_it_prints_json_for_programs(run):
    output = json.loads(CliRunner().invoke(goodput_command, [str(run), "--json", "--window", "20"]).output)
    assert output["wall"] == pytest.approx(6000)
    assert output["goodput"] == pytest.approx({"run": 0.9, "last 20 min": 1.0, "worst 20 min": 0.5})
    assert output["seconds"]["run"]["input"] == pytest.approx(600)
    assert output["steps"] == 100


def test_bad_input_is_one_line(run, tmp_path):
    older = record(tmp_path / "older.jsonl", uneven(5, 2, 0.1))
    for arguments, said in (
        [[str(run), "--window", "0"], "x>0"],
        [[str(run), "--run", "3"], "there is no run 3"],
        [[str(tmp_path / "none.jsonl")], "No such file"],
        [[str(older)], "Record the run again"],
    ):
        done = CliRunner().invoke(goodput_command, arguments)
        assert done.exit_code == 2
        assert said in done.output
        assert "Traceback" not in done.output


def test_restores_and_losses_are_counted_in_words():
    ledger = Ledger(np.array([9.0]), np.full((1, len(CAUSES)), 1.0), 100, 2, 1, 1200, 1, 3)
    assert in_words(ledger) == (
        f"{len(CAUSES)} s, 100 steps, 2 starts, 1 restore (1,200 steps with 1 example taken again), "
        "workers lost in 3 steps"
    )
    assert in_words(ledger._replace(restores=0, losses=0)) == f"{len(CAUSES)} s, 100 steps, 2 starts"
    assert [*windows(ledger, 1e3)] == ["run"]


def test_the_table_has_productive_causes_first_and_then_the_costliest():
    seconds = {"computing": 1.0, "input": 2.0, "hooks": 6.0, "down": 9e-4, "joins": 1e-3, "unaccounted": -1.001}
    first, *rows, last = as_table({"run": dict.fromkeys(CAUSES, 0.0) | seconds}).splitlines()
    assert first.split() == ["run"]
    cells = [" ".join(row.split()).removesuffix(CAUSES[row.split()[0]]).strip() for row in rows]
    assert cells == [
        "computing 1 s 12 %",
        "hooks 6 s 75 %",
        "input 2 s 25 %",
        "joins 1 ms < 0.1 %",
        "unaccounted −1 s 13 %",
    ]
    assert last.split() == ["goodput", "12", "%"]
