"""The number of workers: requested, joined from the reserve, announced in the status, changed between two steps."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive as ad
from adaptive.base import world as base
from adaptive.base.process.signals import TerminationNotice
from adaptive.base.roster import Roster
from adaptive.base.worker_slots import WorkerSlots
from adaptive.base.world import Loss
from adaptive.control.membership import Membership


class World(WorkerSlots, base.World):
    """Worker slots whose joining workers are ready when the test sets it; of one process, or of one per slot."""

    def __init__(self, size=4, workers=2, *, processes=1, least=1, respawn=False, there=True):
        super().__init__(size, workers, least)
        self.processes, self.respawn = processes, respawn
        self.workers, self.survives = range(size if processes == 1 else 1), processes > 1
        self.called, self.come, self.changes, self.gathered = [], there, [], 0
        self.leave_requests = [0.0] * size  # of the others, when they are asked

    def poll_ready(self):
        return super().poll_ready() if self.come else 0

    def request_workers(self, workers):
        self.called.append(workers)
        super().request_workers(workers)

    def change(self, workers, leaving=()):
        self.changes.append((workers, tuple(leaving)))
        super().change(workers, leaving)

    def all_gather_bytes(self, value, about="", more=""):
        self.gathered += 1
        if about.startswith("who leaves"):
            others = [[self.leave_requests[s], s, s + 1, "SIGTERM", f"pid {s}"] for s in range(1, self.capacity)]
            return [value, *(json.dumps(other).encode() for other in others)]
        return [value] + [b"0"] * (self.processes - 1)


def said(membership, world, *, joining=None, wishes=None):
    """A status arrives."""
    count = membership.ready_to_join if joining is None else joining
    world.leave_requests = wishes or [0.0] * world.capacity
    membership.on_agreed(ready_to_join=count, leave_requests=np.array(world.leave_requests))


def long_ago():
    return TerminationNotice("SIGUSR1", time.monotonic() - 1)


def just_now():
    return TerminationNotice("SIGTERM", time.monotonic() + 1000)


def test_without_a_request_the_target_is_the_number_of_members():
    world = World()
    membership = Membership(world)
    assert (membership.target, membership.pending, membership.numbers) == (2, False, (2, 1, 4))
    membership.change()
    world.join(3)
    membership.change()
    world.leave(0)
    world.leave(1)
    membership.change()
    assert (membership.target, membership.asked, world.changes, world.called) == (1, None, [], [])


def test_the_highest_worker_slots_leave_at_once_and_the_lowest_free_ones_are_taken_once_all_are_ready():
    world = World(workers=2, processes=2)
    membership = Membership(world)
    assert membership.request(4) == []
    assert (membership.target, membership.pending, world.called) == (4, True, [4])
    assert membership.ready_to_join == 2
    membership.change()  # nothing was heard yet
    for few in (0, 1):
        said(membership, world, joining=few)
        membership.change()
        assert world.members == (0, 1)
    said(membership, world)
    membership.change()
    assert (world.members, world.joined_in_generation, membership.pending) == ((0, 1, 2, 3), (0, 0, 1, 1), False)
    world.leave(1)
    membership.request(2)
    membership.change()
    assert world.members == (0, 2)


def test_without_a_status_processes_exchange_leaves_in_each_step_and_readiness_while_workers_are_missing():
    world = World(processes=2)
    membership = Membership(world, in_status=False)
    membership.change()
    assert (world.gathered, membership.due) == (1, True)  # who leaves
    membership.request(4)
    membership.change()
    assert (world.gathered, world.members) == (3, (0, 1, 2, 3))
    world.leave_requests[2] = 2
    membership.change()
    assert (world.gathered, world.members) == (4, (0, 1, 3))


@pytest.mark.parametrize(("asked", "target"), [(2, 3), (4, 4)])
def test_workers_that_join_without_a_request_stay(asked, target):
    world = World(workers=2, there=False)
    membership = Membership(world)
    membership.request(asked)
    world.join(2)
    membership.change()
    assert (world.members, membership.target) == ((0, 1, 2), target)


@pytest.mark.parametrize(
    ("asked", "got", "note"),
    [
        (9, 4, "hook 'grow': workers 9 clipped to 4, the most available."),
        (1, 2, "hook 'grow': workers 1 clipped to 2, the fewest allowed."),
        (4, 4, None),
    ],
)
def test_an_impossible_number_of_workers_is_clipped_with_a_note(asked, got, note):
    membership = Membership(World(workers=3, least=2))
    assert membership.request(asked, ["grow"]) == [note] * (note is not None)
    assert membership.target == got


def test_a_number_that_splits_a_process_is_rounded_with_a_note():
    world = World(workers=2)
    world.nearest = lambda workers: min(workers // 2 * 2, 4)
    membership = Membership(world)
    assert membership.request(3) == ["program.rescale: workers 3 rounded to 2, for whole processes."]
    with pytest.raises(ad.WorkerCountError, match="The nearest is 2"):
        membership.exactly(3)
    assert membership.exactly(4) == 4


def test_a_needed_worker_does_not_leave():
    world = World(size=4, workers=4)
    membership = Membership(world, needed=(2,))
    assert membership.numbers == (4, 3, 4)
    assert membership.request(1) == ["program.rescale: workers 1 clipped to 3, the fewest allowed."]
    membership.change()
    world.leave(0)
    assert (world.members, membership.numbers.least) == ((1, 2), 2)
    for wrong, says in ((1, "2 to 4 are"), (10**40, "2 to 4 are"), (2.5, "whole number")):
        with pytest.raises(ad.WorkerCountError, match=says):
            membership.exactly(wrong)


def test_a_lost_worker_lowers_the_target_unless_it_is_replaced():
    for respawn, asked, target in ((False, 3, 2), (True, 3, 3), (False, 5, 4)):
        world = World(size=6, workers=3, respawn=respawn, there=False)
        membership = Membership(world)
        membership.request(asked)
        world.leave(1)
        membership.change()
        assert (membership.target, world.members) == (target, (0, 2))
        world.come = True
        membership.change()
        assert len(world.members) == target


def test_a_lost_process_of_the_reserve_is_not_waited_for():
    world = World(workers=2, there=False)
    membership = Membership(world)
    membership.request(4)
    world._gone.update({2, 3})
    membership.change()
    assert (membership.target, membership.pending) == (2, False)


# --- preemption -------------------------------------------------------------------------------------------------------


def preempted(wishes, processes=3, **how):
    """Members of which some wish to leave."""
    world = World(size=processes, workers=len(wishes), processes=processes)
    membership = Membership(world, **how)
    said(membership, world, wishes=[*wishes, *[0] * (processes - len(wishes))])
    return world, membership


def test_a_preempted_worker_leaves_for_good_at_its_deadline():
    world, membership = preempted([0, 1, 0])
    membership.change()
    assert (world.members, membership.why_all_leave) == ((0, 1, 2), "")
    said(membership, world, wishes=[0, 2, 0])
    assert [str(leaver) for leaver in membership.change()] == ["worker 1 (SIGTERM to pid 1)"]
    assert (world.changes, world.members, world.most, membership.target) == ([(2, (1,))], (0, 2), 2, 2)
    assert membership.change() == []
    assert len(world.changes) == 1
    membership.request(3)
    assert membership.target == 2


def test_at_the_deadline_of_one_all_preempted_workers_leave():
    world, membership = preempted([1, 0, 2, 1], 4, termination=just_now)
    assert (membership.leave_request, membership.leaving) == (1, (0, 2, 3))
    membership.change()
    assert world.members == (1,)


def test_a_worker_preempted_during_the_step_leaves_too():
    world, membership = preempted([0, 2, 0], termination=long_ago)  # this process, too, wants to leave by now
    assert membership.leave_request == 2
    assert len(membership.change()) == 2
    assert world.changes == [(1, (0, 1))]
    said(membership, world)
    assert membership.change() == []
    assert world.gathered == 1


def test_if_all_workers_are_preempted_the_run_ends():
    world, membership = preempted([1, 2], termination=just_now)  # the third is in reserve
    membership.change()
    assert membership.why_all_leave == "all workers received a termination signal"
    assert world.changes == []


@pytest.mark.parametrize(
    ("survives", "least", "needed", "why"),
    [
        (False, 1, (), "worker 1 received a termination signal, and in this job a single process cannot"),
        (True, 3, (), "worker 1 received a termination signal, and fewer than min_workers=3 would be left"),
        (True, 1, (1, 2), "worker 1 received a termination signal, and the driver needs what worker 1 broa"),
        (True, 2, (0, 2), ""),
    ],
)
def test_the_run_ends_if_the_other_workers_cannot_continue(survives, least, needed, why):
    world = World(size=3, workers=3, processes=3, least=least)
    world.survives = survives
    membership = Membership(world, needed=needed)
    said(membership, world, wishes=[0, 2, 0])
    assert membership.why_all_leave.startswith(why) if why else not membership.why_all_leave
    membership.change()
    assert world.members == ((0, 1, 2) if why else (0, 2))


def test_a_signal_preempts_all_workers_of_one_process():
    heard: list[TerminationNotice] = []
    membership = Membership(World(), termination=lambda: heard[0] if heard else None)
    assert (membership.leave_request, membership.leaving, membership.why_all_leave) == (0, (), "")
    heard.append(just_now())
    assert (membership.leave_request, bool(membership.why_all_leave)) == (2, True)


def test_leaving_workers_are_replaced_if_lost_ones_are():
    world = World(size=4, workers=3, processes=3, respawn=True)
    membership = Membership(world)
    said(membership, world, wishes=[0, 0, 2, 0])
    membership.change()
    assert (world.members, membership.target, world.called) == ((0, 1), 3, [3])


events = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 7)),
    st.tuples(st.just("lose"), st.integers(0, 4)),
    st.tuples(st.just("preempted"), st.lists(st.integers(0, 2), min_size=5, max_size=5)),
    st.tuples(st.just("come"), st.booleans()),
)


@given(st.lists(events, max_size=30), st.booleans())
def test_any_sequence_of_events_leaves_a_member_and_reaches_the_last_target(happened, respawn):
    world = World(size=5, workers=3, processes=5, respawn=respawn)
    membership = Membership(world)
    for kind, what in happened:
        wishes = None
        if kind == "ask":
            membership.request(what)
        elif kind == "lose" and what in world.members and len(world.members) > 1:
            world.leave(what)
        elif kind == "preempted":
            wishes = [float(w) for w in what]
        elif kind == "come":
            world.come = what
        said(membership, world, wishes=wishes)
        if membership.why_all_leave:
            return
        membership.change()
        assert 1 <= len(world.members) <= world.most
    world.come = True
    target = membership.nearest(membership.target)
    for _ in range(2):
        said(membership, world)
        membership.change()
    assert len(world.members) == membership.target == target


class Losing(World):
    """A worker is lost in the operation whose name begins with `where`, once."""

    def __init__(self, where, worker_slot, **options):
        super().__init__(size=6, workers=3, processes=6, **options)
        self.where, self.worker_slot = where, worker_slot

    def lose(self, name):
        if self.where is not None and name.startswith(self.where):
            self.where = None
            self.losses = (Loss((self.worker_slot,), "rank", name, 0.0),)
            self.leave(self.worker_slot)

    def change(self, workers, leaving=()):
        self.lose("a change")
        stay = [worker_slot for worker_slot in self.members if worker_slot not in leaving]
        super().change(workers if self.come else min(workers, len(stay)), leaving)

    def all_gather_bytes(self, value, about="", more=""):
        self.lose(about)
        return super().all_gather_bytes(value, about, more)


@pytest.mark.parametrize(("respawn", "where"), [(False, "who leaves"), (True, "workers ready to join")])
def test_a_loss_during_an_exchange_counts_as_missing_only_if_replaced(where, respawn):
    world = Losing(where, 1, respawn=respawn)
    membership = Membership(world, in_status=False)
    membership.request(5)
    membership.change()
    for _ in range(2):
        membership.change()
    assert world.losses
    assert membership.target == len(world.members) == (5 if respawn else 4)


@pytest.mark.parametrize("respawn", [False, True])
def test_a_loss_during_a_membership_change_counts_as_missing_only_if_replaced(respawn):
    world = Losing("a change", 0, respawn=respawn, there=False)
    membership = Membership(world)
    membership.request(5)
    said(membership, world, wishes=[0, 0, 2, 0, 0, 0])
    membership.change()
    assert world.losses
    assert world.members == (1,)
    world.come = True
    said(membership, world)
    membership.change()
    assert membership.target == len(world.members) == (5 if respawn else 3)


@pytest.mark.parametrize("restored", [False, True])
def test_a_worker_lost_during_a_build_or_restore_is_replaced(restored):
    """Building a program's parts takes time, and all of them start with the same members."""
    world = World(workers=3, processes=4, respawn=True)
    there = Roster.of(world)
    world.leave(1)
    membership = Membership(world, roster=None if restored else there)
    if restored:
        membership.restart(None, there)
    membership.change()
    said(membership, world)
    membership.change()
    assert world.members == (0, 1, 2)
