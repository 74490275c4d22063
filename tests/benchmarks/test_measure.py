"""The benchmarks' own instruments."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import psutil
import pytest

from benchmarks._measure import alternate, command_line, contention, middle, readable, report, summary
from tests.mpirun import ROOT
from tests.speed import limit

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes cannot be pinned to cores")


def test_alternate_rotates_the_order_and_keeps_warm_up_out():
    heard = []
    seconds = alternate({name: lambda name=name: heard.append(name) for name in "abc"}, rounds=4, warmup=1)
    assert "".join(heard) == "cab" + "abc" + "bca" + "cab" + "abc"
    assert [sample.shape for sample in seconds.values()] == [(4,)] * 3
    assert all((sample > 0).all() for sample in seconds.values())


def test_paired_ratios_do_not_see_drift_that_both_share():
    drift = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    base, half = summary({"base": drift, "half": 0.5 * drift})
    assert base.paired_ratio == (1, 1, 1)
    assert half.paired_ratio == (0.5, 0.5, 0.5)
    assert half.seconds.median == 2.0
    assert half.seconds.p10 == pytest.approx(0.7)
    assert half.seconds.p90 == pytest.approx(6.4)
    assert summary({"base": drift, "half": 0.5 * drift}, baseline="half")[0].ratio_of_medians == 2


def test_a_result_names_the_hardware_and_not_the_host(tmp_path):
    rows = summary({"ours": [1e-3, 2e-3, 3e-3], "theirs": [4e-3, 4e-3, 4e-3]}, baseline="theirs")
    text = report("Ours is faster", rows, tmp_path / "results" / "speed.md", notes=["Three rounds."])
    assert (tmp_path / "results" / "speed.md").read_text() == text
    head, table, note, machine = text.strip().split("\n\n")
    assert (head, note) == ("# Ours is faster", "Three rounds.")
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")[1:4]] == ["ours", "2.00 ms", "1.20 ms – 2.80 ms"]
    assert f"Python {platform.python_version()}, jax " in machine
    assert platform.node() not in text
    assert str(ROOT) not in text


def test_seconds_are_readable():
    texts = [readable(seconds) for seconds in (12.34, 1.0, 0.01234, 123.4e-6, 5e-9, 0.0)]
    assert texts == ["12.3 s", "1.00 s", "12.3 ms", "123 µs", "5 ns", "0 ns"]


def test_the_middle_of_seeds_says_what_is_unknown_and_what_was_never_reached():
    assert middle([1, 2, 4]) == "2.00 (1.00 – 4.00)"
    assert middle([3, 3], 0, " ms") == "3 ms"
    assert middle([1, 2, np.inf], 1) == "2.0 (1.0 – never)"
    assert middle([np.nan, 1234.5, 5.0], None) == "620 (5 – 1,234), 2 of 3"
    assert middle([np.nan], unknown="no progress") == "no progress"


def test_options_have_the_type_of_their_default_and_a_result_is_written_only_if_asked(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/start.py"])
    parser = command_line("What it measures.", rounds=3, wait=(0.5, "seconds"), only="", rank=None, flag=False)
    given = ["--rounds", "5", "--wait", "1", "--flag", "--write"]
    for arguments, expected in (([], [3, 0.5, "", None, False, None]), (given, [5, 1.0, "", None, True, "start.md"])):
        found = parser.parse_args(arguments)
        assert [found.rounds, found.wait, found.only, found.rank, found.flag, found.write] == expected


@needs_linux
def test_pin_moves_threads_that_are_there_already():
    program = (
        "import os, threading; from benchmarks._measure import pin; stop = threading.Event();"
        "thread = threading.Thread(target=stop.wait); thread.start(); core = min(os.sched_getaffinity(0)); pin(core);"
        "there = [os.sched_getaffinity(int(t)) == {core} for t in os.listdir('/proc/self/task')]; stop.set();"
        "assert len(there) > 1 and all(there)"
    )
    # In a process of its own: here it would slow down the rest of the suite.
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=limit(100))


@needs_linux
def test_contention_spins_on_its_core_until_its_parent_has_ended():
    core = max(os.sched_getaffinity(0))
    program = (
        "import time; from benchmarks._measure import contention\n"
        f"with contention({core}) as (pid,):\n"
        "    print(pid, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        neighbor = psutil.Process(int(parent.stdout.readline()))
        assert neighbor.cpu_affinity() == [core]
    finally:
        parent.kill()
        parent.communicate()
    _, alive = psutil.wait_procs([neighbor], timeout=limit(30))
    assert not alive


@needs_linux
def test_contention_on_a_core_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="cannot run on core 9999"), contention(9999):
        pass
