"""Where a run came from, in the report."""

from __future__ import annotations

from adaptive.html_report.about import about, differences
from adaptive.html_report.columns import read_columns

from .made_up import record, uneven

ORIGIN = {
    "process": 1e9, "build": 1e9 + 1, "built": 1e9 + 2, "hosts": ["a", "b"], "command": ["train.py", "--lr", "3"],
    "commit": "abc", "versions": {"python": "3.11.7", "jax": "0.10.2"},
    "settings": {"max_local_batch": [8, 8, 8], "batch sizes": [4, 5], "seed": 0},
}  # fmt: skip


def test_rows_name_hosts_versions_commit_and_settings(tmp_path):
    path = record(tmp_path / "run.jsonl", uneven(9, 2, 0.1), fields={1: {"origin": ORIGIN}, 5: {"origin": ORIGIN}})
    assert about(read_columns(path)) == {
        "began": "2001-09-09 01:46:40 UTC, started 2 times",
        "hosts": "a, b",
        "command": "train.py --lr 3",
        "commit": "abc",
        "python": "3.11.7",
        "jax": "0.10.2",
        "max_local_batch": "3 × 8",
        "batch sizes": "4, 5",
        "seed": "0",
    }


def test_an_older_record_has_no_rows(tmp_path):
    assert about(read_columns(record(tmp_path / "run.jsonl", uneven(9, 2, 0.1)))) == {}


def test_differences_cover_the_fields_of_both_runs():
    a, b = {"began": "now", "seed": "0", "jax": "1"}, {"began": "then", "seed": "1", "jax": "1", "microbatch": "8"}
    assert differences(a, b) == [("seed", "0", "1"), ("microbatch", "–", "8")]
