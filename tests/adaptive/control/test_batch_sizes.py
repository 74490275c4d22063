"""From a request for other sizes to the step that has them."""

from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
from adaptive.base.decision import Decision, Limits
from adaptive.control.batch_sizes import BatchSizes


class Made:
    """Kernels that are ready when the test sets it."""

    def __init__(self):
        self.able, self.ready, self.prepared, self.waited = False, set(), [], []

    def ready_for(self, sizes):
        return sizes in self.ready

    def ready_for_any(self):
        return self.able

    def prepare(self, sizes, current):
        self.prepared.append((sizes, current))

    def wait_for(self, sizes):
        self.waited.append(sizes)


def in_force(global_batch=12, upper=(10, 10), shares=(1, 1), quantum=1, examples=100, **how):
    sizes = BatchSizes(global_batch, shares, Limits((1,) * len(upper), upper, examples=examples), quantum=quantum)
    sizes.made = Made()
    sizes.take_effect(sizes.made, **how)
    return sizes


def step(sizes, *, ready=None, able=False):
    """A step in which all processes send this one's status, or the given one."""
    sizes.on_agreed(
        can_make_pending=sizes.can_make_pending if ready is None else ready,
        can_make_any=able or sizes.can_make_any,
    )
    sizes.step_done()


def test_a_request_waits_until_all_can_make_it():
    sizes = in_force()
    assert sizes.request(Decision(global_batch=16)) == []
    assert (sizes.current, sizes.pending, sizes.target) == ((6, 6), (8, 8), (8, 8))
    assert sizes.made.prepared == [((8, 8), (6, 6))]
    step(sizes)
    assert (sizes.previous, sizes.current, sizes.pending) == ((6, 6), (6, 6), (8, 8))
    sizes.made.ready = {(8, 8)}
    assert sizes.can_make_pending
    step(sizes, ready=False)  # another process is not
    assert sizes.pending == (8, 8)
    step(sizes)
    assert (sizes.previous, sizes.current, sizes.pending) == ((6, 6), (8, 8), None)
    step(sizes, ready=True)  # where nothing waits, nothing changes
    assert (sizes.previous, sizes.can_make_pending) == ((8, 8), False)


def test_where_any_sizes_can_be_made_the_next_step_has_them():
    sizes = in_force()
    sizes.request(Decision(global_batch=16))
    step(sizes, able=True)
    assert sizes.current == (8, 8)
    sizes.request(Decision(global_batch=14))
    assert (sizes.current, sizes.pending) == ((7, 7), None)


def test_without_a_status_new_sizes_wait_for_their_kernels():
    sizes = in_force(shares=(1, 2), waits=True)
    sizes.request(Decision(global_batch=np.int64(6)))
    assert (sizes.current, sizes.pending, sizes.made.waited) == ((2, 4), None, [(2, 4)])


def test_the_quantum_follows_the_batch_before_it_is_split():
    limits = Limits((1, 1), (4000, 4000), examples=10_000)
    sizes = BatchSizes(100, None, limits)
    assert (sizes.current, sizes.limits.quantum) == ((50, 50), 2)
    sizes.request(Decision(global_batch=4001, shares=(1.0, 2.0)))
    assert sizes.limits.quantum == 64
    assert sizes.target == (1344, 2657)
    sizes.request(Decision(global_batch=100))
    assert (sizes.limits.quantum, sizes.target) == (2, (34, 66))
    given = BatchSizes(100, None, limits, quantum=8)
    assert given.current == (50, 50)  # the first sizes are equal
    given.request(Decision(global_batch=4001))
    assert given.limits.quantum == 8


def test_a_later_decision_replaces_one_that_waits():
    sizes = in_force()
    sizes.request(Decision(global_batch=16))
    sizes.request(Decision(shares=(3, 1)))  # of the batch asked for, not of the one in force
    assert sizes.pending == (10, 6)
    sizes.request(Decision(global_batch=12, shares=(1, 1)))
    assert sizes.pending is None  # what is in force already has nothing to wait for


def test_if_every_size_is_compiled_a_later_decision_queues():
    sizes = in_force(one_by_one=True)
    for batch in (16, 14, 18):  # or one that comes in every step would put all of them off for ever
        sizes.request(Decision(global_batch=batch))
        assert sizes.pending == (8, 8)
        assert sum(sizes.target) == batch
    step(sizes, ready=True)
    assert (sizes.current, sizes.pending, sizes.target) == ((8, 8), (9, 9), (9, 9))
    assert sizes.made.prepared[-1] == ((9, 9), (8, 8))
    step(sizes, ready=True)
    assert (sizes.current, sizes.pending) == ((9, 9), None)
    sizes.request(Decision(global_batch=10))
    sizes.request(Decision(global_batch=12))
    sizes.request(Decision(global_batch=18))  # what is in force already has nothing to wait for
    assert (sizes.pending, sizes.target) == (None, (9, 9))


@pytest.mark.parametrize("decision", [Decision(stop=True), Decision(notes=("seen",)), Decision(global_batch=11)])
def test_a_decision_that_asks_for_no_other_size_changes_no_split(decision):
    sizes = in_force(global_batch=11, upper=(20, 20, 20), shares=(1, 1, 1))
    sizes.restart((4, 4, 3), (1, 1, 1))
    sizes.limits = sizes.limits._replace(quantum=4)
    sizes.request(decision)
    assert sizes.target == (4, 4, 3)


@pytest.mark.parametrize(("asked", "taken", "examples"), [(1, 2, 100), (1000, 20, 100), (18, 15, 15)])
def test_a_batch_out_of_range_is_clipped_with_a_note(asked, taken, examples):
    sizes = in_force(examples=examples)
    (note,) = sizes.request(Decision(global_batch=asked), ["grow"])
    assert note.startswith(f"hook 'grow': global batch {asked} clipped to {taken}")
    assert sum(sizes.target) == taken


def test_shares_that_give_members_nothing_are_refused_by_the_hooks_name():
    sizes = in_force(upper=(10, 10, 10), shares=(1, 1, 0))
    sizes.change_members([0, 1], [])
    with pytest.raises(ad.BatchSizeError, match="hook 'split': shares give examples only to worker slot 2, which is"):
        sizes.request(Decision(shares=(0, 0, 1)), ["split"])


@pytest.mark.parametrize(
    ("global_batch", "wrong"),
    [
        (True, "whole number of examples; got True"),
        (-4, "positive; got -4"),
        (1, "too small for 2 workers: each takes at least one example per step, except those with a share of 0"),
        (21, "more than the maximum of the 2 workers, 20"),
    ],
)
def test_a_global_batch_that_cannot_be_is_refused(global_batch, wrong):
    with pytest.raises(ad.BatchSizeError, match=wrong):
        in_force(global_batch=global_batch)


def test_readiness_says_nothing_of_later_sizes():
    sizes = in_force()
    sizes.request(Decision(global_batch=16))
    step(sizes, ready=True)
    sizes.request(Decision(global_batch=18))
    sizes.step_done()  # of a step that ended before its last message
    assert (sizes.current, sizes.pending) == ((8, 8), (9, 9))
    sizes.on_agreed(can_make_pending=True, can_make_any=False)
    sizes.restart((9, 5), (2, 1))
    assert sizes.shares == (2, 1)
    assert (sizes.current, sizes.previous, sizes.pending) == ((9, 5), (9, 5), None)
    sizes.request(Decision(global_batch=15))
    sizes.step_done()
    assert (sizes.current, sizes.pending) == ((9, 5), (10, 5))


def test_a_new_worker_starts_with_the_mean_share_of_those_that_stay():
    sizes = in_force(40, (40,) * 5, (3, 1, 4, 0, 0))
    sizes.change_members([0, 1, 2, 3, 4], [1, 3], lost=[1])  # another worker took the slot of worker 1 at once
    assert sizes.shares == (3, 3.5, 4, 3.5, 0)
    sizes.change_members([1, 3], [1])
    assert sizes.shares == (0, 3.5, 0, 3.5, 0)
    sizes.change_members([0, 2], [0, 2])
    assert (sizes.shares, sizes.current) == ((1, 0, 1, 0, 0), (20, 0, 20, 0, 0))


def test_by_hand_sizes_are_exact_or_refused():
    sizes = in_force(12, (10, 10, 10), (1, 1, 0))
    sizes.change_members([0, 1], [])
    assert sizes.exactly() == Decision()
    assert sizes.exactly(16) == Decision(16)
    assert sizes.exactly(shares=(1, 2, 3)) == Decision(None, (1, 2, 0))
    assert sizes.exactly(30, slots=(0, 1, 2)) == Decision(30)
    for asked in ({"global_batch": 21}, {"global_batch": 11, "shares": (0, 1, 0)}, {"shares": (1, 0, 0)}):
        with pytest.raises(ad.BatchSizeError, match="is more than the maximum of the"):
            sizes.exactly(**asked)
    with pytest.raises(ad.BatchSizeError, match="only to worker slot 2, which is empty"):
        sizes.exactly(shares=(0, 0, 1))


# --- losses before all kernels are compiled ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"waits": True}, {"fixed_by": "the driver"}])
def test_the_batch_is_split_anew_and_kernels_that_are_missing_are_waited_for(how):
    sizes = in_force(96, (96,) * 3, (1, 1, 1), **how)
    assert sizes.change_members([0, 2], [], lost=[1]) == []
    assert (sizes.current, sizes.pending, sizes.made.waited) == ((48, 0, 48), None, [(48, 0, 48)])
    sizes.made.ready = {(0, 0, 96)}
    sizes.change_members([2], [], lost=[0])
    assert (sizes.current, len(sizes.made.waited)) == ((0, 0, 96), 1)


def test_bounds_follow_limits_and_shares():
    sizes = BatchSizes(12, None, Limits((1,) * 3, (8,) * 3))
    assert sizes.bounds((1.0, 0.0, 1.0)).active == (0, 2)
    assert sizes.bounds().active == (0, 1, 2)
    sizes.request(Decision(shares=(1.0, 1.0, 0.0)))
    assert sizes.bounds().active == (0, 1)
    sizes.change_members([0, 2], [])
    assert sizes.bounds().active == (0,)
