"""What processes say of themselves with a step, summed over all, is what each of them hears."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive as ad
from adaptive.base.decision import Decision
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.status import Status


class Process:
    """One of several processes, and its sizes."""

    unowned_slots = ()

    def __init__(
        self,
        workers: range,
        size: int,
        processes: int,
        *,
        can_make_pending: bool = False,
        can_make_any: bool = False,
        ready_to_join: int = 0,
        leave_request: int = 0,
    ):
        self.workers, self.capacity, self.processes = workers, size, processes
        self.can_make_pending, self.can_make_any = can_make_pending, can_make_any
        self.heard = None
        self.digest = DecisionDigest()
        self.members = Members(ready_to_join, leave_request)
        self.status = Status(self, self.digest, self, self.members)

    def on_agreed(self, *, can_make_pending: bool, can_make_any: bool) -> None:
        self.heard = (can_make_pending, can_make_any)


class Members:
    """A process's announcements of joining and leaving workers, and what it receives."""

    def __init__(self, ready_to_join: int, leave_request: int):
        self.ready_to_join, self.leave_request, self.heard = ready_to_join, leave_request, None

    def on_agreed(self, *, ready_to_join: int, leave_requests: np.ndarray) -> None:
        self.heard = (ready_to_join, leave_requests.tolist())


def processes(counts, saying):
    ends = np.cumsum(counts).tolist()
    ranges = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [Process(r, ends[-1], len(counts), **said) for r, said in zip(ranges, saying, strict=True)]


def exchange(all_of_them, dtype=np.float32):
    total = sum(p.status.encode().astype(dtype) for p in all_of_them)
    for process in all_of_them:
        process.status.decode(total)


saying = st.lists(
    st.fixed_dictionaries({"can_make_pending": st.booleans(), "can_make_any": st.booleans()}), min_size=1, max_size=4
)


@given(saying, st.integers(1, 3), st.sampled_from([np.float32, np.float64]))
def test_all_are_ready_if_each_is(saying, workers, dtype):
    these = processes([workers] * len(saying), saying)
    exchange(these, dtype)
    expected = (all(s["can_make_pending"] for s in saying), all(s["can_make_any"] for s in saying))
    assert [p.heard for p in these] == [expected] * len(these)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from([np.float32, np.float64]),
)
def test_joining_workers_are_summed_and_each_worker_may_ask_to_leave(announced, dtype):
    saying = [{"ready_to_join": ready, "leave_request": request} for _, ready, request in announced]
    these = processes([workers for workers, _, _ in announced], saying)
    exchange(these, dtype)
    requests = [request for workers, _, request in announced for _ in range(workers)]
    assert [p.members.heard for p in these] == [(sum(ready for _, ready, _ in announced), requests)] * len(these)


@pytest.mark.parametrize("asking", [[False, False], [False, True]])
def test_when_one_asks_for_a_checkpoint_all_hear_of_it_once(asking):
    these = processes([1, 2], [{}, {}])
    for process, asks in zip(these, asking, strict=True):
        process.status.checkpoint_due = asks
    exchange(these)
    assert [p.status.checkpoint_requested for p in these] == [any(asking)] * 2
    for process in these:
        process.status.checkpoint_due = False
    exchange(these)
    assert not any(p.status.checkpoint_requested for p in these)


@pytest.mark.parametrize("counts", [[1, 1], [1, 3, 2]])
def test_a_process_that_decided_otherwise_is_found_by_all_and_takes_nothing_up(counts):
    these = processes(counts, [{"can_make_pending": True}] * len(counts))
    for number, process in enumerate(these):
        process.digest.enter(3, "hook 'grow'", Decision(global_batch=64 if number != 1 else 65))
    total = sum(p.status.encode().astype(np.float32) for p in these)
    for process in these:
        with pytest.raises(ad.DisagreementError, match="decided differently"):
            process.status.decode(total)
        assert process.heard is None


def test_all_hear_each_workers_seconds():
    these = processes([2, 1], [{}, {"ready_to_join": 1}])
    these[0].status.own_seconds = 0.5, [1.0, 2.0], [3.0, 4.0]
    these[1].status.own_seconds = 0.25, [8.0], [16.0]
    for _ in range(2):
        exchange(these)
        assert [[field.tolist() for field in p.status.seconds(0.0)] for p in these] == [
            [[0.5, 0.5, 0.25], [1, 2, 8], [3, 4, 16], [13, 12, 0]]
        ] * 2
    # Worker 1 was busy for 4 s and waited for 15 s, in all messages; the others were busy for less or more of these 19.
    assert these[0].status.seconds(15.0).waiting.tolist() == [16, 15, 3]


def test_repeated_facts_are_applied_once_and_others_at_once():
    one, two = processes([1, 1], [{"can_make_any": True}, {"can_make_any": True}])
    exchange([one, two])
    for process in (one, two):
        process.status.repeats, process.heard = True, None
    two.status.own_seconds = 1.0, [2.0], [3.0]
    exchange([one, two])
    assert (one.heard, two.heard) == (None, None)
    assert one.status.seconds(0.0).busy.tolist() == [0, 3]
    two.status.repeats, two.members.leave_request, two.status.checkpoint_due = False, 2, True
    exchange([one, two])
    assert [p.members.heard for p in (one, two)] == [(0, [0, 2])] * 2
    assert one.heard == (False, True)
    one.status.repeats = two.status.repeats = True
    exchange([one, two])
    assert one.status.checkpoint_requested


def test_empty_worker_slots_send_no_digest():
    first, second, gone = processes([1, 1, 1], [{}, {}, {}])
    for process in (first, second):
        process.unowned_slots, process.processes = tuple(gone.workers), 2
    exchange([first, second])
    second.digest.enter(1, "hook 'a'", Decision(global_batch=8))
    with pytest.raises(ad.DisagreementError, match="decided differently"):
        exchange([first, second])
