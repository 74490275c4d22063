"""Simulated links between hosts: the overhead of steps, and the scenarios in which links become slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import adaptive as ad
import controllers as ctrl
from controllers.simulate import LINK_SCENARIOS, Cluster, Hooked, link_scenario, simulate, slow_links
from controllers.simulate._line_up import equal
from controllers.simulate._links import Links

COVERS = ("controllers/simulate/_links.py",)


def overheads(name, steps=80, factor=2.0):
    cluster = replace(link_scenario(name, steps, factor), overhead_noise=0.0)
    return simulate([Hooked(equal(), ())], cluster, [128] * 8 + [0] * 4, steps).overhead / cluster.overhead


@pytest.mark.parametrize("name", LINK_SCENARIOS)
def test_links_are_slow_from_a_quarter_of_the_run_on(name):
    found = overheads(name)
    assert (found[:19] == 1).all()
    assert found.max() == 2
    assert (found[60:].min() == 2) == (name not in ("link_for_a_while", "link_flaps"))


def test_how_they_are_slow():
    assert (overheads("link_for_a_while")[40:] == 1).all()
    assert set(overheads("link_flaps")[19:]) == {1, 2}
    assert (np.diff(overheads("link_degrades")[20:40]) > 0).all()


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"no scenario with links is called 'none'; known are slow_link"):
        link_scenario("none")


def cluster_of(links, hosts=None, n=4):
    return Cluster(ctrl.timing.BatchTime(np.full(n, 1e-3)), overhead=0.1, links=links, hosts=hosts)


def test_a_link_without_members_at_both_ends_costs_nothing():
    links = Links(cluster_of(slow_links((1, 2), lambda step: 3.0, hosts=3), [0, 1, 1, 2]), 0)
    np.testing.assert_allclose(links.overhead(1, 0.0, (0, 1, 3)), 0.3)
    np.testing.assert_allclose(links.overhead(1, 0.0, (0, 1, 2)), 0.1)
    np.testing.assert_allclose(links.overhead(1, 0.0, (1, 2)), 0.1)  # one host


def test_a_probe_has_the_members_hosts():
    links = Links(cluster_of(slow_links((2,), lambda step: 3.0, hosts=3), [0, 1, 1, 2]), 0)
    probe = links.probe(7, 0.0, (1, 3))
    assert (probe.hosts, probe.host_of.tolist(), probe.step) == (("h1", "h2"), [-1, 0, -1, 1], 7)
    np.testing.assert_array_equal(probe.seconds, [[np.nan, 3.0], [3.0, np.nan]])


def test_workers_see_how_long_they_were_in_messages():
    seen = []
    policy = equal()._replace(update=lambda observation, state: (seen.append(observation.values[0]), (None, state))[1])
    cluster = Cluster(ctrl.timing.BatchTime(np.array([1e-3, 2e-3])), overhead=0.05)
    simulate([Hooked(policy, ("exchange_seconds",))], cluster, [10, 10], 2)
    assert np.isnan(seen[0]).all()
    np.testing.assert_allclose(seen[1], [0.06, 0.05])


def test_who_has_left_for_good_does_not_come_back():
    def update(observation, state):
        leave = (1,) if observation.step == 3 else ()
        return ad.Decision(workers=4 if observation.step > 3 else None, leave=leave), state

    policy = equal()._replace(update=update)
    cluster = replace(cluster_of(None), first=3)
    simulation = simulate([Hooked(policy, ())], cluster, [8, 8, 8, 0], 10)
    assert simulation.members[3:].tolist()[-1] == [True, False, True, True]
