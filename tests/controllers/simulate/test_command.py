"""`adaptive simulate` and `adaptive replay`: tables, pictures, the user's own policies, and errors that help."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from click.testing import CliRunner

import adaptive as ad
import controllers as ctrl
from controllers.simulate import Cluster, names, simulate
from controllers.simulate import _command as command
from controllers.simulate._tables import draw
from tests.controllers.simulate.test_replay import write


def run(*arguments):
    """Standard output of a command that succeeds."""
    done = _invoke(*arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


def refused(*arguments):
    """The complaint of one that does not."""
    done = _invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    return done.stderr


def _invoke(*arguments):
    which = command.replay if arguments[:1] == ("replay",) else command.simulate
    return CliRunner().invoke(which, arguments[which is command.replay :], catch_exceptions=False)


def rows(text):
    """The cells of a table, by their first column."""
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_the_table_gives_the_distance_from_the_best_split():
    out = run("drift", "--steps", "60", "--workers", "4", "--policy", "equal", "--policy", "balance")
    table = rows(out)
    assert out.startswith("drift, 4 workers, 60 steps: ")
    assert table["policy"][2] == "over best"
    assert float(table["balance"][2]) < float(table["equal"][2])
    assert float(table["equal"][4]) == 1.0
    assert float(table["balance"][4]) > 1.1
    assert out == run("drift", "--steps", "60", "--workers", "4", "--policy", "equal", "--policy", "balance")
    other = ("--seed", "1", "--policy", "equal", "--policy", "balance")
    assert out != run("drift", "--steps", "60", "--workers", "4", *other)


def test_all_scenarios_at_once():
    out = run("all", "--steps", "8", "--workers", "2", "--policy", "equal")
    assert [line.partition(",")[0] for line in out.splitlines() if ", 8 steps: " in line] == names()


def test_the_list_names_all():
    out = run("--list")
    for name in (*names(), "balance", "lb_bsp", "goodput_batch", "goodput_workers"):
        assert f"\n  {name} " in out


def test_where_there_is_a_reserve_the_table_counts_workers():
    small = ("--steps", "150", "--workers", "6", "--policy", "equal", "--policy", "noise_workers@5")
    table = rows(run("scaling", *small))
    assert table["policy"][5:] == ["workers", "worker-s", "goodput"]
    assert float(table["equal"][5]) == 2
    assert 2 < float(table["noise_workers@5"][5]) <= 6
    assert float(table["noise_workers@5"][6]) > float(table["equal"][6])
    assert float(table["noise_workers@5"][7]) > float(table["equal"][7])
    assert rows(run("spot", *small[:-2]))["policy"][5:] == ["workers", "worker-s"]  # without a noise scale no goodput
    assert len(rows(run("step_change", *small))["policy"]) == 5


def test_policies_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import controllers as ctrl\n"
        "def make():\n"
        "    return ctrl.published.static_proportional()\n"
        "ready = ctrl.Policy(lambda n: (), lambda seen, state: (None, state))\n"
        "nothing = 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    small = ("drift", "--steps", "20", "--workers", "4", "--policy")
    table = rows(run(*small, "mine:make@5", "--policy", "mine:ready"))
    assert table["mine:make@5"][3] == "1"
    assert "mine:ready" in table
    assert "No module named 'yours'" in refused(*small, "yours:make")
    assert "has no attribute 'other'" in refused(*small, "mine:other")
    assert "makes one; got 5" in refused(*small, "mine:nothing")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name a scenario"),
        (["nowhere"], "no scenario is called 'nowhere'; known are step_change, "),
        (["drift", "--policy", "best"], "no policy is called 'best'"),
        (["drift", "--workers", "1"], "x>=2"),
        (["replay"], "Missing argument 'TRACE'"),
        (["replay", "there-is-no-such-file"], "No such file"),
        (["all", "--png", "x.png"], "takes one scenario"),
    ],
)
def test_mistakes_are_named(arguments, complaint):
    assert complaint in refused(*arguments)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    run("spot", "--steps", "30", "--png", str(path), "--policy", "equal", "--policy", "balance@5")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(path.read_bytes()) > 10_000


def test_the_error_about_missing_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    simulation = simulate(ctrl.balance(), Cluster(ctrl.timing.BatchTime(np.ones(2))), 8, 3)
    with pytest.raises(RuntimeError, match=r"pip install 'adaptive-dataflow\[examples\]'"):
        draw({"balance": simulation}, tmp_path / "picture.png")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    times = ctrl.timing.BatchTime(np.array([1e-3, 3e-3]), np.array([0.01, 0.0]))
    policy = ctrl.Policy(lambda n: (), lambda o, s: (ad.Decision(shares=(9.0, 7.0)) if o.step == 20 else None, s))
    write(path, simulate(policy, Cluster(times), 64, 60), [("0/balance", 10)])
    return path


def test_a_recorded_run_is_compared_with_other_policies(trace):
    out = run("replay", str(trace))
    table = rows(out)
    assert float(table["as recorded"][4]) == 1.0
    assert float(table["balance"][4]) > 1.1
    assert "is a guess" not in out
    assert "reads capac" not in run("replay", str(trace), "--policy", "static")
    assert "lb_bsp reads cpu_available" in refused("replay", str(trace), "--policy", "lb_bsp")
