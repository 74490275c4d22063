"""`adaptive simulate --link`: strategies on links, with the seconds of scenarios."""

from __future__ import annotations

import numpy as np
import optax
import pytest

import collectives.strategies as sync
from controllers.simulate import scenario, simulate
from controllers.simulate._line_up import equal
from controllers.simulate._strategies import default_strategies, strategy_named
from tests.controllers.simulate.test_command import refused, rows, run

COVERS = ("controllers/simulate/_strategies.py", "controllers/simulate/_tables.py")

SMALL = ("--workers", "4", "--hosts", "2", "--steps", "20", "--parameters", "1e6")


def test_a_link_on_a_scenario():
    out = run("step_change", "--link", "100Mbit/s", *SMALL)
    table = rows(out)
    assert out.startswith("step_change, equal, 4 workers on 2 hosts, 1,000,000 parameters, 100Mbit/s\n")
    assert list(table)[2:] == default_strategies(2)
    made = scenario("step_change", 4, 20)
    simulation = simulate(equal(), made.cluster, made.global_batch, 20)
    cost = sync.step_cost(
        sync.synchronous(optax.sgd(0.1)), 1e6, "100Mbit/s", hosts=2, workers_per_host=2, compute=simulation.seconds
    )
    assert table["synchronous"][0] == f"{1e3 * cost.seconds:.3g} ms"
    assert table["synchronous"][4:] == ["4 MB", "1"]
    assert float(table["diloco,wire=4bit"][5]) > float(table["synchronous,wire=4bit"][5]) > 1
    assert table["streamed"][3] != "0%"
    assert "\nThe first that computes at least 90% of the time: islands\n" in out


def test_a_policy_divides_the_batch():
    out = run("step_change", "--link", "1Gbit/s", *SMALL, "--policy", "equal", "--policy", "balance")
    first, second = out.split("\n\nstep_change, balance, ")
    assert rows(first)["synchronous"][0] != rows(second)["synchronous"][0]


def test_several_links_and_no_scenario():
    names = ("--strategy", "diloco,steps=4", "--strategy", "local_steps,steps=4")
    table = rows(run("--compute", "0.25", "--link", "all", "--hosts", "4", "--workers", "4", *names))
    assert table["strategy"] == ["10Mbit/s", "100Mbit/s", "1Gbit/s", "10Gbit/s", "100Gbit/s"]
    assert table["diloco,steps=4"] == table["local_steps,steps=4"]
    assert table["diloco,steps=4"][0] == "120 s"
    late = rows(run("--compute", "0.25", "--link", "8Gbit/s", "--link", "8Tbit/s", "--workers", "2", "--latency", "1"))
    assert late["diloco"] == ["284 ms", "280 ms"], "three messages after one another, once in 100 steps"


def test_where_no_strategy_computes_most_of_the_time():
    out = run("--compute", "0.001", "--link", "1Mbit/s", "--hosts", "4", "--workers", "4")
    assert "\nNone computes 90% of the time; most, " in out
    assert "90%" not in run("--compute", "0", "--link", "1Mbit/s", "--workers", "4")


def test_strategies_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "my_strategies.py").write_text(
        "import optax, collectives.strategies as sync\n"
        "def make():\n"
        "    return sync.synchronous(optax.sgd(0.1), wire='8bit')\n"
        "both = sync.hybrid(make(), make())\n"
        "nothing = 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    small = ("--compute", "1", "--link", "1Gbit/s", "--workers", "4", "--strategy")
    table = rows(run(*small, "my_strategies:make", "--strategy", "synchronous,wire=8bit"))
    assert table["my_strategies:make"] == table["synchronous,wire=8bit"]
    assert "'hybrid' does not declare what it sends" in refused(*small, "my_strategies:both")
    assert "expected a collectives.strategies.Strategy" in refused(*small, "my_strategies:nothing")
    assert "must take no arguments" in refused(*small, "optax:sgd")


@pytest.mark.parametrize(
    "name", ["model_averaging,wire=float16", "pair_averaging,schedule=ring", "streamed,fragments=2"]
)
def test_names_of_strategies(name):
    assert strategy_named(name, 2, 1).name == name.partition(",")[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["equal", "--link", "fast"], "rate='fast' must be bits per second"),
        (["equal", "--link", "1Mbit/s", "--hosts", "3"], "--workers 8 are not equally many on --hosts 3"),
        (["--link", "1Mbit/s"], "give a scenario (see --list), or"),
        (["equal", "--link", "1Mbit/s", "--compute", "1"], "give a scenario (see --list), or"),
        (["equal", "--link", "1Mbit/s", "--png", "x.png"], "--png shows policies"),
        (["equal", "--hosts", "2"], "--hosts needs a link"),
        (["equal", "--strategy", "diloco"], "--strategy needs a link"),
        (["equal", "--link", "1Mbit/s", "--strategy", "best"], "no strategy is called 'best'"),
        (["equal", "--link", "1Mbit/s", "--strategy", "diloco,wires=1"], "'wires=1' is not an option of diloco"),
        (["equal", "--link", "1Mbit/s", "--strategy", "diloco,steps"], "'steps' is not an option of diloco"),
        (["equal", "--link", "1Mbit/s", "--strategy", "diloco,steps=a"], "'a' is not a whole number"),
        (["equal", "--link", "1Mbit/s", "--strategy", "diloco,wire=3bit"], "wire='3bit'"),
        (["equal", "--link", "1Mbit/s", "--strategy", "quorum,wire=top_k"], "top_k"),
        (["equal", "--link", "1Mbit/s", "--parameters", "1.5"], "parameters=1.5 must be"),
    ],
)
def test_mistakes_are_named(arguments, complaint):
    assert complaint in refused(*arguments)


def test_seconds_of_absent_workers_are_not_waited_for():
    made = scenario("elastic", 4, 20)
    simulation = simulate(equal(), made.cluster, made.global_batch, 20)
    assert (simulation.seconds == 0).any()
    table = rows(run("elastic", "--link", "1Gbit/s", *SMALL, "--strategy", "synchronous"))
    assert np.isfinite(float(table["synchronous"][5]))
