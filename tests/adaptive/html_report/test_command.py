"""The commands `adaptive report --follow` and `adaptive compare`."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner

from adaptive.html_report.command import compare, report

from .made_up import record, uneven
from .test_about import ORIGIN

pytest.importorskip("bokeh")
pytest.importorskip("jinja2")


def test_a_followed_report_reloads_and_the_last_one_stays(tmp_path, monkeypatch):
    run, page, seen = tmp_path / "run.jsonl", tmp_path / "run.html", []
    record(run, uneven(5, 1, 0.1), fields={1: {"origin": ORIGIN}})

    def sleep(seconds):
        seen.append((seconds, page.read_text(), page.stat().st_mtime_ns))
        if len(seen) == 2:  # a line more
            with run.open("a") as file:
                file.write(run.read_text().splitlines()[-1].replace('"step": 5', '"step": 6') + "\n")
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    done = CliRunner().invoke(report, [str(run), "--follow", "--every", "3"], catch_exceptions=False)
    assert done.exit_code == 0
    pages = [text for _, text, _ in seen]
    assert all(seconds == 3 for seconds, _, _ in seen)
    assert all('<meta http-equiv="refresh" content="3.0">' in text for text in pages)
    assert seen[0][2] == seen[1][2]  # nothing was added to the record
    assert "Run of 5 steps" in pages[1]
    assert "Run of 6 steps" in pages[2]
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "train.py --lr 3" in page.read_text()
    assert "<dt" in page.read_text()


def test_compare_prints_and_writes_a_page(tmp_path):
    a = record(tmp_path / "a.jsonl", uneven(50, 1, 0.1))
    b = record(tmp_path / "b.jsonl", 2 * uneven(50, 1, 0.1))
    page = tmp_path / "compared.html"
    done = CliRunner().invoke(compare, [str(a), str(b), "-o", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output.startswith("a.jsonl → b.jsonl\n")
    assert "2.00 times as slow" in done.output
    text = page.read_text()
    assert "2.00 times as slow" in text
    assert "<h1>a.jsonl and b.jsonl</h1>" in text
    assert "src=" not in text.split("<script>", maxsplit=1)[0]
    for arguments, said in (
        [[str(a), str(tmp_path / "none.jsonl")], "none.jsonl: No such file"],
        [[str(a), str(b), "-o", str(a)], "would overwrite the record"],
        [[str(a), str(b), "-o", str(tmp_path / "no/where.html")], "does not exist"],
    ):
        done = CliRunner().invoke(compare, arguments)
        assert done.exit_code == 2
        assert said in done.output
