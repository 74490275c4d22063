"""Slow links: messages that take longer than before, and which host's links a probe names."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from adaptive.base.link_probe import LinkProbe, no_links
from controllers.timing.slow_links import SlowLinks
from tests.controllers.observations import observe

HOSTS, N = 4, 8  # two workers on each host


def probe(step, slow=(), factor=2.0, hosts=HOSTS, noise=0.0, members=None):
    """A probe of hosts whose links take 10 ms a megabyte; `slow` are hosts, or pairs of hosts."""
    seconds = np.full((hosts, hosts), 0.01) * np.exp(noise * np.random.default_rng(step).standard_normal(hosts))
    seconds = np.maximum(seconds, seconds.T)
    for link in slow:
        where = (link,) if isinstance(link, int) else link
        if len(where) == 1:
            seconds[where[0], :] *= factor
            seconds[:, where[0]] = seconds[where[0], :]
        else:
            seconds[where] *= factor
            seconds[where[::-1]] = seconds[where]
    np.fill_diagonal(seconds, np.nan)
    host_of = np.repeat(np.arange(hosts), N // hosts)
    there = host_of if members is None else np.where(np.isin(np.arange(N), members), host_of, -1)
    return LinkProbe(tuple(f"h{host}" for host in range(hosts)), there, seconds, step)


def fed(series, state=None, start=1):
    """The state after steps with these seconds of messages, and the first step of each slow phase."""
    state, phases = (SlowLinks.init(N).sized(N) if state is None else state), []
    for step, seconds in enumerate(series, start):
        before, state = state.since, state.observe(step, seconds)
        if state.slow and state.since != before:
            phases.append(step)
    return state, phases


def jittered(steps, factor=1.0, seed=0):
    return 0.1 * factor * np.exp(0.05 * np.random.default_rng(seed).standard_normal(steps))


def slowed(factor=1.3, baseline=None, steps=60):
    """A state that has seen a probe, and then messages `factor` times as long."""
    state, _ = fed(jittered(steps))
    baseline = probe(5) if baseline is None else baseline
    _, state = state.awaiting(5).heard(observe(batch_sizes=(1,) * N)._replace(links=baseline))
    state, phases = fed(jittered(15, factor, seed=1), state, steps + 1)
    assert len(phases) == 1
    return state


def after_probe(state, links):
    """The notes and the state after a probe, and, in a slow phase, after another one that confirms it."""
    notes, state = heard(state, links)
    return heard(state, links) if state.suspected.any() else (notes, state)


def heard(state, links):
    return state.awaiting(links.step).heard(observe(batch_sizes=(1,) * N)._replace(links=links))


# --- seconds of messages ----------------------------------------------------------------------------------------------


def test_quiet_messages_are_no_alarm():
    _, phases = fed(jittered(10_000))
    assert phases == []


def test_messages_that_take_longer_are_found_within_fifteen_steps_and_what_they_cost():
    state, phases = fed([*jittered(100), *jittered(15, 1.3, seed=1)])
    assert 100 < phases[0] <= 115
    assert abs(state.since - 100) <= 3
    assert 1.2 < state.factor < 1.4
    np.testing.assert_allclose(state.unnamed, 15 * 0.03, rtol=0.3)
    recovered, _ = fed(jittered(15, seed=2), state, 116)
    assert not recovered.slow
    assert recovered.unnamed == 0


def test_messages_that_take_ever_longer_are_found_far_above_their_best():
    ramp = np.linspace(1, 3, 300)
    state, phases = fed(jittered(100))
    state, phases = fed([0.1 * factor for factor in ramp], state, 101)
    assert len(phases) == 1
    assert 0.1 * ramp[phases[0] - 101] < 0.1 * 1.8
    assert state.factor > 2


def test_a_pause_and_unknown_seconds_are_no_alarm():
    series = jittered(300)
    series[150] *= 50
    series[200:205] = np.nan
    assert fed(series)[1] == []


def test_other_members_have_other_messages():
    state, _ = fed(jittered(60))
    state = state.sized(N - 1)
    assert fed(jittered(60, 2.0), state, 61)[1] == []
    assert fed(jittered(60, 2.0), state.sized(N - 1).of_size(N - 2).sized(N - 2), 61)[1] == []
    swapped, _ = fed(jittered(60))
    assert len(fed(jittered(60, 2.0), swapped.of_size(N + 1).sized(N + 1), 61)[1]) == 1


# --- probes -----------------------------------------------------------------------------------------------------------


def test_a_probe_is_wanted_once_before_and_in_a_slow_phase_again_when_it_has_cost_twice_as_much():
    members = tuple(range(N))
    state = SlowLinks.init(N).sized(N)
    assert state.wants_probe(members)
    _, state = heard(state, probe(5))
    assert not state.wants_probe(members)
    state, _ = fed(jittered(60), state)
    assert state.wants_probe(members), "once more when a slow phase could be found"
    _, state = heard(state, probe(60))
    assert not state.wants_probe(members)
    state = slowed()
    assert state.wants_probe(members)
    notes, state = after_probe(state, probe(76))
    assert notes == ("no link between hosts is slower than before",)
    assert not state.wants_probe(members)
    step = 77
    while not state.wants_probe(members):
        state, _ = fed([0.13], state, step)
        step += 1
    assert 77 + 10 < step < 77 + 25


def test_a_worker_that_joins_is_probed():
    _, state = after_probe(SlowLinks.init(N).sized(N), probe(5, members=range(6)))
    assert not state.wants_probe(tuple(range(6)))
    assert state.wants_probe(tuple(range(7)))


def test_worlds_that_cannot_probe_are_asked_once():
    _, state = after_probe(SlowLinks.init(N).sized(N), no_links(N)._replace(step=5))
    assert not state.wants_probe(tuple(range(N)))
    notes, state = after_probe(slowed(), no_links(N)._replace(step=80))
    assert notes == ()
    assert not state.named.any()


def test_an_older_probe_does_not_answer():
    state = slowed().awaiting(80)
    assert state.heard(observe(batch_sizes=(1,) * N)._replace(links=probe(79, [1]))) == ((), state)


@pytest.mark.parametrize("factor", [1.3, 4.0])
def test_a_host_all_of_whose_links_are_slow_is_named(factor):
    notes, state = after_probe(slowed(factor), probe(80, [2], factor, noise=0.02))
    (note,) = notes
    assert note.startswith("the links of host h2 (workers 4, 5) are slow: ")
    assert np.flatnonzero(state.named).tolist() == [4, 5]
    np.testing.assert_allclose(state.lost[4], state.lost[5])
    assert state.lost[4] > 0
    assert state.unnamed == 0


def test_of_two_hosts_with_a_slow_link_between_them_the_later_is_named():
    (note,), state = after_probe(slowed(), probe(80, [(1, 3)]))
    assert note == "the link between hosts h1 and h3 is slow: 50 MB/s, 100 before"
    assert np.flatnonzero(state.named).tolist() == [6, 7]


def test_or_the_one_with_fewer_workers():
    (_,), state = after_probe(slowed(), probe(80, [(1, 3)], members=[0, 1, 2, 4, 5, 6, 7]))
    assert np.flatnonzero(state.named).tolist() == [2]


@pytest.mark.parametrize(("hosts", "slow"), [(2, [0]), (2, [(0, 1)]), (4, [0, 1, 2])])
def test_where_most_links_are_slow_no_host_is_to_blame(hosts, slow):
    (note,), state = after_probe(slowed(baseline=probe(5, hosts=hosts)), probe(80, slow, hosts=hosts))
    assert note.endswith("No host is to blame")
    assert not state.named.any()


def test_a_link_that_was_always_slow_is_not_named():
    state = slowed(baseline=probe(5, [1], 4.0))
    notes, state = after_probe(state, probe(80, [1], 4.0))
    assert notes == ("no link between hosts is slower than before",)


def test_of_two_probes_before_the_faster_counts():
    _, state = heard(slowed(baseline=probe(5, [1], 3.0))._replace(since=np.asarray(0)), probe(60))
    notes, _ = after_probe(state._replace(since=np.asarray(61)), probe(80, [1], 3.0))
    assert notes[0].startswith("the links of host h1 ")


def test_what_one_probe_says_must_be_confirmed_by_another():
    state = slowed()
    notes, state = heard(state, probe(80, [2]))
    assert notes == ()
    assert np.flatnonzero(state.suspected).tolist() == [4, 5]
    assert not state.named.any()
    assert state.wants_probe(tuple(range(N)))
    notes, other = heard(state, probe(81, [1]))
    assert notes == ("two probes of the links name different hosts",)
    assert not other.named.any()
    assert not other.suspected.any()
    assert not other.wants_probe(tuple(range(N)))
    notes, none = heard(state, probe(81))
    assert notes == ("no link between hosts is slower than before",)
    assert not none.named.any()
    assert not none.suspected.any()


def test_a_probe_for_a_worker_that_joins_leaves_the_named():
    _, state = after_probe(slowed(), probe(80, [2], members=range(6)))
    assert np.flatnonzero(state.named).tolist() == [4, 5]
    state = state._replace(known=np.where(np.arange(N) < 6, 2, 0))
    assert state.wants_probe(tuple(range(N)))
    notes, state = heard(state, probe(85))
    assert (notes, np.flatnonzero(state.named).tolist()) == ((), [4, 5])
    assert not state.wants_probe(tuple(range(N)))


def test_a_host_that_was_not_measured_hides_no_other():
    links = probe(80, [2])
    links.seconds[0, :] = links.seconds[:, 0] = np.nan
    _, state = after_probe(slowed(), links)
    assert np.flatnonzero(state.named).tolist() == [4, 5]


def test_when_the_named_have_left_and_messages_stay_slow_links_are_probed_anew():
    _, state = after_probe(slowed(), probe(80, [2]))
    assert not state.wants_probe(tuple(range(N)))
    state, steps = state.without_named(), 0
    while not state.wants_probe(tuple(range(N))):
        state, _ = fed([0.13], state, 81 + steps)
        steps += 1
    assert 10 < steps < 25, "as long as it took before"
    _, state = after_probe(state, probe(81 + steps, [1]))
    assert np.flatnonzero(state.named).tolist() == [2, 3]


def test_a_new_host_is_compared_with_the_others():
    state = slowed(baseline=probe(5, members=range(6)))
    assert state.wants_probe(tuple(range(N)))
    (note,), state = after_probe(state, probe(80, [3]))
    assert note.startswith("the links of host h3 ")
    assert not state.wants_probe(tuple(range(N)))


def test_the_state_keeps_its_structure_and_grows_with_the_workers():
    first, larger = SlowLinks.init(3), SlowLinks.init(4)
    after = slowed()
    assert jax.tree.structure(first) == jax.tree.structure(after)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(SlowLinks.init(N))]
    assert [np.shape(leaf) for leaf in jax.tree.leaves(after)] == shapes
    dtypes = [np.asarray(leaf).dtype for leaf in jax.tree.leaves(larger)]
    assert [np.asarray(leaf).dtype for leaf in jax.tree.leaves(after_probe(after, probe(80, [2]))[1])] == dtypes
