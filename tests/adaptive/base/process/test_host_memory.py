"""What memory the machine has left, against control groups of our own making."""

from __future__ import annotations

import psutil
import pytest

from adaptive.base.process.host_memory import MemoryLeft


@pytest.fixture
def machine(monkeypatch):
    """A machine of 1000 bytes, of which 600 are available."""
    memory = type("Memory", (), {"total": 1000, "available": 600})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def group(folder, limit, usage, inactive):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {inactive}\n")


def left(tmp_path, membership):
    (tmp_path / "cgroup").write_text(membership)
    return MemoryLeft(tmp_path / "cgroup", tmp_path / "fs")()


@pytest.mark.usefixtures("machine")
def test_the_system_s_word_counts_where_no_limit_is_lower(tmp_path):
    assert MemoryLeft(tmp_path / "none", tmp_path)() == 600
    group(tmp_path / "fs/job", "max", 100, 0)
    group(tmp_path / "fs", 5000, 100, 0)
    assert left(tmp_path, "0::/job\n") == 600
    group(tmp_path / "fs", 300, 100, 0)  # a container, whose path is the host's
    assert left(tmp_path, "0::/docker/ab\n") == 200


@pytest.mark.usefixtures("machine")
def test_the_tightest_limit_around_the_process_counts(tmp_path):
    group(tmp_path / "fs/slurm/job/step", "max", 90, 0)
    group(tmp_path / "fs/slurm/job", 300, 120, 20)
    group(tmp_path / "fs/slurm", 900, 150, 0)
    assert left(tmp_path, "1:cpu:/elsewhere\n0::/slurm/job/step\n") == 200
    group(tmp_path / "fs/slurm", 250, 240, 0)
    assert left(tmp_path, "0::/slurm/job/step\n") == 10
    group(tmp_path / "fs/slurm", 250, 260, 0)  # over it, for the moment
    assert left(tmp_path, "0::/slurm/job/step\n") == 0


def test_usage_is_read_each_time_and_the_limit_once(tmp_path, machine):
    group(tmp_path / "fs/job", 300, 100, 0)
    (tmp_path / "cgroup").write_text("0::/job\n")
    meter = MemoryLeft(tmp_path / "cgroup", tmp_path / "fs")
    assert meter() == 200
    (tmp_path / "fs/job/memory.current").write_text("250")
    assert meter() == 50
    machine.available = 20
    assert meter() == 20
