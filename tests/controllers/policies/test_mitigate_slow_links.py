"""`mitigate_slow_workers` with the seconds of messages: a swap of a host whose links have become slow."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import controllers as ctrl
from adaptive import DriverError
from controllers.simulate import Hooked, link_scenario, simulate
from controllers.simulate._link_scenarios import HOST, WORKER
from tests.controllers.observations import observe

COVERS = ("controllers/policies/mitigate_slow_workers.py", "controllers/timing/slow_links.py")

STEPS, AT = 240, 60
READS = "seconds", "exchange_seconds"


def run(name="slow_host", reads=READS, steps=STEPS, reserve=4, every=5, factor=3.0, **options):
    """The simulation, and what the policy has noted."""
    cluster = link_scenario(name, STEPS, factor)
    if reserve < 4:
        gone = np.arange(cluster.workers) >= 8 + reserve
        cluster = replace(cluster, present=lambda step: ~gone)
    policy, said = ctrl.mitigate_slow_workers(**options), []

    def update(observation, state):
        decision, state = policy.update(observation, state)
        if observation.due and decision is not None:
            said.extend((observation.step, note) for note in decision.notes)
        return decision, state

    hook = Hooked(policy._replace(update=update), reads, every)
    return simulate([hook], cluster, [128] * 8 + [0] * 4, steps, seed=1), said


def decided(simulation, field):
    return [(step, getattr(decision, field)) for step, decision in simulation.decisions if getattr(decision, field)]


def test_a_host_with_slow_links_is_named_and_workers_of_the_reserve_replace_its_own():
    simulation, said = run()
    text = "\n".join(note for _, note in said)
    assert re.search(r"messages take (2\.9|3\.)\d* times as long as before, since step \d+", text)
    assert f"the links of host h{HOST} (workers 2, 3) are slow: " in text
    assert "the links of workers 2, 3 have cost " in text
    assert "workers 2, 3 leave: the workers that have joined take the examples" in text
    (named, *_), ((left, slots),) = [step for step, note in said if "are slow" in note], decided(simulation, "leave")
    assert AT < named <= AT + 15
    assert slots == (2, 3)
    assert named < left <= named + 15
    assert simulation.members[-1].tolist() == [True, True, False, False] + [True] * 6 + [False] * 2
    assert simulation.global_batch[-1] == 8 * 128
    np.testing.assert_allclose(
        np.median(simulation.step_seconds[-30:]), np.median(simulation.step_seconds[:AT]), rtol=0.05
    )


def test_probes_are_few():
    simulation, _ = run()
    probes = [step for step, _ in decided(simulation, "probe")]
    assert probes[0] == 5, "before anything is slow"
    assert len([step for step in probes if step > AT]) <= 5, "two of the slow phase, and of who has joined"
    quiet, said = run(steps=AT - 1)
    assert len(decided(quiet, "probe")) == 2, "at first, and when a slow phase could be found"
    assert not any("messages" in note for _, note in said)


def test_without_the_seconds_of_messages_links_are_not_looked_at():
    simulation, said = run(reads=("seconds",))
    assert decided(simulation, "probe") == decided(simulation, "leave") == []
    assert not any("link" in note for _, note in said)


def test_a_reserve_that_is_too_small_replaces_nobody_but_the_run_may_end():
    simulation, said = run(reserve=1)
    assert any("are slow" in note for _, note in said)
    assert decided(simulation, "workers") == decided(simulation, "leave") == []
    simulation, said = run(reserve=1, end_seconds=2.0)
    assert decided(simulation, "stop")
    assert any("the links of workers 2, 3 have cost " in note and "the run ends" in note for _, note in said)


def test_a_dear_swap_waits_until_the_loss_exceeds_it():
    cheap, dear = (decided(run(swap_seconds=seconds)[0], "leave")[0][0] for seconds in (0.2, 10.0))
    assert cheap + 15 < dear


def test_a_slow_link_and_a_slow_worker_at_once_are_both_replaced():
    simulation, _ = run("link_and_worker", every=1)
    assert decided(simulation, "leave")[0][1] == (2, 3)
    assert simulation.sizes[-1][WORKER] == 0
    assert simulation.members[-1][WORKER]
    np.testing.assert_allclose(
        np.median(simulation.step_seconds[-30:]), np.median(simulation.step_seconds[:AT]), rtol=0.05
    )


def test_the_least_time_in_messages_counts_because_others_wait_for_workers():
    policy = ctrl.mitigate_slow_workers()
    state = policy.init(3)
    given = np.array([0.1, 0.1, 0.1]), np.array([0.5, 0.02, np.nan])
    for step in range(1, 4):
        seen = observe(*given, step=step, batch_sizes=(8, 8, 8), due=False)
        state = policy.update(seen, state)[1]
    np.testing.assert_allclose(state.links.changes.origin, np.log(0.02))


@pytest.mark.parametrize("more", [(np.zeros(2),), (np.zeros(3), np.zeros(3))])
def test_other_values_are_refused(more):
    policy = ctrl.mitigate_slow_workers()
    with pytest.raises((DriverError, ValueError)):
        policy.check((np.zeros(3), *more), 3, policy.name)
