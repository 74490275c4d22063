"""What processes say of themselves with a step, summed over all, is what each of them hears."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive as ad
from adaptive.base.decision import Decision
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.status import Status, status_length


class Process:
    """One of several processes, and its sizes."""

    unowned_slots = ()

    def __init__(
        self,
        workers: range,
        size: int,
        processes: int,
        *,
        ready: bool = False,
        able: bool = False,
        call: float = 0.0,
        newcomers: int = 0,
        wish: int = 0,
    ):
        self.workers, self.capacity, self.processes = workers, size, processes
        self.ready, self.able, self.call, self.heard = ready, able, call, None
        self.digest = DecisionDigest()
        self.members = Members(newcomers, wish)
        self.status = Status(self, self.digest, self, self.members)

    def agreed(self, *, ready: bool, able: bool, call: float) -> None:
        self.heard = (ready, able, call)


class Members:
    """What a process says of those who come and go, and what it hears."""

    def __init__(self, newcomers: int, wish: int):
        self.newcomers, self.wish, self.heard = newcomers, wish, None

    def agreed(self, *, newcomers: int, wishes: np.ndarray) -> None:
        self.heard = (newcomers, wishes.tolist())


def processes(counts, saying):
    ends = np.cumsum(counts).tolist()
    ranges = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [Process(r, ends[-1], len(counts), **said) for r, said in zip(ranges, saying, strict=True)]


def exchange(all_of_them, dtype=np.float32):
    total = sum(p.status.encode().astype(dtype) for p in all_of_them)
    for process in all_of_them:
        process.status.decode(total)


saying = st.lists(st.fixed_dictionaries({"ready": st.booleans(), "able": st.booleans()}), min_size=1, max_size=4)


@given(saying, st.integers(1, 3), st.sampled_from([np.float32, np.float64]))
def test_all_are_ready_if_each_is(saying, workers, dtype):
    these = processes([workers] * len(saying), saying)
    exchange(these, dtype)
    expected = (all(s["ready"] for s in saying), all(s["able"] for s in saying), 0.0)
    assert [p.heard for p in these] == [expected] * len(these)


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([np.float32, np.float64])
)
def test_what_a_call_costs_is_the_mean_of_the_processes(costs, workers, dtype):
    these = processes([workers] * len(costs), [{"call": cost} for cost in costs])
    exchange(these, dtype)
    heard = {p.heard[2] for p in these}
    assert len(heard) == 1
    assert heard.pop() == pytest.approx(np.mean(costs), rel=1e-5)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from([np.float32, np.float64]),
)
def test_newcomers_are_summed_and_each_worker_says_whether_it_wants_to_leave(told, dtype):
    saying = [{"newcomers": newcomers, "wish": wish} for _, newcomers, wish in told]
    these = processes([workers for workers, _, _ in told], saying)
    exchange(these, dtype)
    wishes = [wish for workers, _, wish in told for _ in range(workers)]
    assert [p.members.heard for p in these] == [(sum(newcomers for _, newcomers, _ in told), wishes)] * len(these)


@pytest.mark.parametrize("asking", [[False, False], [True, False], [False, True], [True, True]])
def test_when_one_asks_for_a_checkpoint_all_hear_of_it_once(asking):
    these = processes([1, 2], [{}, {}])
    for process, asks in zip(these, asking, strict=True):
        process.status.asks = asks
    exchange(these)
    assert [p.status.asked for p in these] == [any(asking)] * 2
    for process in these:
        process.status.asks = False
    exchange(these)
    assert not any(p.status.asked for p in these)


@pytest.mark.parametrize("counts", [[1, 1], [2, 1], [1, 3, 2]])
def test_a_process_that_decided_otherwise_is_found_by_all_and_takes_nothing_up(counts):
    these = processes(counts, [{"ready": True}] * len(counts))
    for number, process in enumerate(these):
        process.digest.enter(3, "hook 'grow'", Decision(global_batch=64 if number != 1 else 65))
    total = sum(p.status.encode().astype(np.float32) for p in these)
    for process in these:
        with pytest.raises(ad.DisagreementError, match="decided differently"):
            process.status.decode(total)
        assert process.heard is None


def test_a_status_is_as_long_as_it_says():
    (one,) = processes([3], [{}])
    assert one.status.encode().shape == (one.status.length,) == (status_length(3),)


def test_of_seats_that_no_process_carries_nobody_expects_a_digest():
    first, second, gone = processes([1, 1, 1], [{}, {}, {}])
    for process in (first, second):
        process.unowned_slots, process.processes = tuple(gone.workers), 2
    exchange([first, second])
    second.digest.enter(1, "hook 'a'", Decision(global_batch=8))
    with pytest.raises(ad.DisagreementError, match="decided differently"):
        exchange([first, second])
