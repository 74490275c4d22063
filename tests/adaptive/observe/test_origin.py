"""The origin of a run: process, hosts, versions, commit."""

from __future__ import annotations

import sys
import time

import jax
import psutil

from adaptive.observe.origin import RunOrigin, commit_of, process_started

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_start_of_the_process_is_that_of_the_kernel():
    assert time.time() - 86400 < process_started() == psutil.Process().create_time() < time.time() + 1


def test_the_commit_of_a_checkout_is_read_from_its_files(tmp_path):
    git, inside = tmp_path / ".git", tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(inside) == ""
    (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    assert commit_of(inside) == COMMIT
    (git / "refs/heads/main").write_text(COMMIT[::-1] + "\n")
    assert commit_of(inside) == COMMIT[::-1]
    (git / "HEAD").write_text(COMMIT + "\n")
    assert commit_of(inside) == COMMIT


def test_the_commit_of_a_linked_work_tree_is_its_own(tmp_path):
    git, linked = tmp_path / "main/.git", tmp_path / "linked"
    own = git / "worktrees/linked"
    own.mkdir(parents=True)
    (git / "refs/heads").mkdir(parents=True)
    (git / "refs/heads/topic").write_text(COMMIT)
    (own / "HEAD").write_text("ref: refs/heads/topic")
    (own / "commondir").write_text("../..")
    linked.mkdir()
    (linked / ".git").write_text(f"gitdir: {own}\n")
    assert commit_of(linked) == COMMIT


def test_fields_are_json_types():
    fields = RunOrigin(1.0, 2.0, 3.0, ("a", "b"), {"global_batch": 8}).fields()
    assert fields["hosts"] == ["a", "b"]
    assert fields["settings"] == {"global_batch": 8}
    assert fields["versions"]["jax"] == jax.__version__
    assert fields["command"] == sys.argv


def test_the_commit_is_that_of_the_script_not_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text(COMMIT)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert RunOrigin(1.0, 2.0, 3.0, (), {}).fields()["commit"] == COMMIT
