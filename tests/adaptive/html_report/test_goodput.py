"""`adaptive goodput`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from adaptive.html_report.goodput import as_table, goodput_command, in_words
from adaptive.observe.ledger import CAUSES, Ledger

PARTS = ("input", "computing", "exchanging", "waiting", "hooks", "compiling", "other")


@pytest.fixture
def run(tmp_path):
    """A run of 100 steps of a minute, of which the first 20 wait for input half of the time."""
    path = tmp_path / "run.jsonl"
    lines = [{"kind": "header", "version": 5, "run_id": "a", "workers": 1, "breakdown": PARTS}]
    for step in range(1, 101):
        parts = {"input": 30.0, "computing": 30.0} if step <= 20 else {"computing": 60.0}
        breakdown = [parts.get(name, 0.0) for name in PARTS]
        lines.append(
            {
                "kind": "step",
                "run_id": "a",
                "step": step,
                "at": 1e9 + 60 * step,
                "batch_sizes": [4],
                "breakdown": breakdown,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_prints_causes(run):
    done = CliRunner().invoke(goodput_command, [str(run)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "run.jsonl: 1 h 40 min, 100 steps, 0 starts"
    assert next(line for line in lines if line.startswith("computing")).split()[1:7] == [
        "1",
        "h",
        "30",
        "min",
        "90",
        "%",
    ]
    assert next(line for line in lines if line.startswith("goodput")).split()[1:] == ["90", "%"]
    assert not any(line.startswith("unaccounted") for line in lines)


def test_it_prints_json_for_programs(run):
    output = json.loads(CliRunner().invoke(goodput_command, [str(run), "--json"]).output)
    assert (output["wall"], output["goodput"]) == pytest.approx((6000, 0.9))
    assert output["seconds"]["input"] == pytest.approx(600)
    assert output["steps"] == 100


def test_bad_input_is_one_line(run, tmp_path):
    for arguments, said in (
        [[str(run), "--run", "3"], "there is no run 3"],
        [[str(tmp_path / "none.jsonl")], "No such file"],
    ):
        done = CliRunner().invoke(goodput_command, arguments)
        assert done.exit_code == 2
        assert said in done.output
        assert "Traceback" not in done.output


def test_restores_and_losses_are_counted_in_words():
    ledger = Ledger(dict.fromkeys(CAUSES, 1.0), 100, 2, 1, 1200, 1, 3)
    assert in_words(ledger) == (
        f"{len(CAUSES)} s, 100 steps, 2 starts, 1 restore (1,200 steps with 1 example taken again), "
        "workers lost in 3 steps"
    )
    assert in_words(ledger._replace(restores=0, losses=0)) == f"{len(CAUSES)} s, 100 steps, 2 starts"


def test_the_table_has_productive_causes_first_and_then_the_costliest():
    seconds = {"computing": 1.0, "input": 2.0, "hooks": 6.0, "down": 9e-4, "joins": 1e-3, "unaccounted": -1.001}
    *rows, last = as_table(Ledger(dict.fromkeys(CAUSES, 0.0) | seconds, 9, 1, 0, 0, 0, 0)).splitlines()
    cells = [" ".join(row.split()).removesuffix(CAUSES[row.split()[0]]).strip() for row in rows]
    assert cells == [
        "computing 1 s 12 %",
        "hooks 6 s 75 %",
        "input 2 s 25 %",
        "joins 1 ms < 0.1 %",
        "unaccounted −1 s 13 %",
    ]
    assert last.split() == ["goodput", "12", "%"]
