"""Hooks between two steps: which are shown what, when they decide, and how their requests are joined."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive import operators
from adaptive.base.decision import Decision, Limits
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.hooks import Hooks, TakenStep, merge
from adaptive.control.membership import Membership
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import Recorder, planned


def hooks_of(*hooks, workers=2, **how):
    """The hooks of a driver, which are `(handler, every)`; each is handed the step's number and rows."""

    def driver(state, batch):
        for number, (handler, every) in enumerate(hooks):
            operators.hook(f"hook{number}", handler, (state, {"rows": jnp.zeros(3) + state}), every=every)
        return state + 1, {}

    how.setdefault("membership", Membership(LocalWorld(workers)))
    return Hooks(planned(driver, 0.0, workers=workers).hooks, workers, **how)


def sizes_of(global_batch=12, workers=2, examples=100):
    return BatchSizes(global_batch, None, Limits((1,) * workers, (40,) * workers, examples=examples), quantum=1)


def steps(those, count, sizes=None, start=1):
    sizes = sizes or sizes_of()
    ran = (sizes.current, sizes.current)
    return [
        those.run(
            TakenStep(s, s / 10, ran, sizes.members), [[jnp.float32(s), jnp.full(3, s)] for _ in those.hooks], sizes
        )
        for s in range(start, start + count)
    ]


def asks(**what):
    return lambda observation: Decision(**what)


# --- when -------------------------------------------------------------------------------------------------------------


def test_a_policy_is_shown_every_step_in_order_and_decides_at_due_ones_and_a_hook_is_shown_these():
    recorder, hook = Recorder(asks(stop=True), every_step=True), Recorder()
    those = hooks_of((recorder, 3), (hook, 4))
    results = steps(those, 8)
    assert [(o.step, o.due) for o in hook.seen] == [(4, True), (8, True)]
    assert those.states == [6, 2]
    assert (results[3].decision, results[3].names) == (None, ["hook1"])
    assert [o.step for o in recorder.seen] == [1, 2, 3, 4, 5, 6]  # 7 and 8 are shown at 9
    assert [o.due for o in recorder.seen] == [False, False, True] * 2
    assert [decision is not None for decision, *_ in results] == [s % 3 == 0 for s in range(1, 9)]
    assert those.names == ["0/hook0", "1/hook1"]


def test_the_next_due_step_is_that_of_the_first_hook_to_decide():
    those = hooks_of((Recorder(), 4), (Recorder(every_step=True), 6))
    due = []
    for step in range(1, 13):
        due.append(those.next_due)
        steps(those, 1, start=step)
    assert due == [4, 4, 4, 4, 6, 6, 8, 8, 12, 12, 12, 12]
    assert those.watches
    assert not hooks_of((Recorder(), 4)).watches
    assert hooks_of().next_due > 10**9


@given(st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=3), st.integers(1, 20))
def test_noting_the_steps_before_the_next_due_one_shows_the_same(kinds, count):
    shown = []
    for noting in (False, True):
        recorders = [Recorder(asks(stop=True), every_step=every_step) for _, every_step in kinds]
        those = hooks_of(*zip(recorders, [every for every, _ in kinds], strict=True))
        sizes, outcomes = sizes_of(), []
        for step in range(1, count + 1):
            taken = TakenStep(step, 0.0, (sizes.current, sizes.current), sizes.members)
            values = [[jnp.float32(step), jnp.zeros(3)] for _ in kinds]
            if noting and step < those.next_due:
                if those.watches:
                    those.note(taken, values)
            else:
                outcomes.append((step, those.run(taken, values, sizes)))
        decided = [(step, outcome) for step, outcome in outcomes if outcome.decision is not None]
        shown.append(([[(o.step, o.due, o.joined) for o in r.seen] for r in recorders], decided))
    assert shown[0] == shown[1]


class Resting(Recorder):
    """Decides, and then rests for ten steps. Its state is the number of the step until which it does."""

    def init(self, n_workers):
        return np.asarray(0)

    def rests_until(self, state):
        return int(state)

    def __call__(self, observation, state):
        super().__call__(observation, state)
        return None, np.asarray(observation.step + 10) if observation.due else state


def test_a_policy_that_rests_is_shown_the_steps_later_and_decides_at_due_ones():
    resting = Resting(every_step=True)
    steps(hooks_of((resting, 4)), 32)
    assert [o.step for o in resting.seen] == list(range(1, 29))
    assert [o.step for o in resting.seen if o.due] == [4, 16, 28]


def test_a_restored_policy_continues_to_rest_and_misses_no_due_step_after_going_back():
    those = hooks_of((Resting(every_step=True), 2))
    steps(those, 2)
    another = hooks_of((again := Resting(every_step=True), 2))
    another.restart(those.states)
    steps(another, 12, start=3)
    assert [o.step for o in again.seen if o.due] == [12]
    recorder = Recorder()
    those = hooks_of((recorder, 10))
    steps(those, 19)
    those.restart(those.first_states)
    steps(those, 11, start=5)
    assert [o.step for o in recorder.seen] == [10, 10]


# --- what -------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    scale: float
    rows: np.ndarray


def test_values_arrive_in_their_pytrees_as_numpy_arrays():
    recorder = Recorder()

    def driver(state, batch):
        operators.hook("watch", recorder, (Pair(state, jnp.zeros(3)), [state]))
        return state, {}

    those = Hooks(planned(driver, 0.0).hooks, 2, Membership(LocalWorld(2)))
    taken = TakenStep(1, 0.5, ((7, 5), (6, 6)), (0, 1))
    those.run(taken, [[jnp.float32(2), jnp.arange(3), jnp.float32(4)]], sizes_of())
    (seen,) = recorder.seen
    pair, (four,) = seen.values
    assert isinstance(pair, Pair)
    assert isinstance(pair.scale, np.float32)
    assert isinstance(pair.rows, np.ndarray)
    assert (float(pair.scale), pair.rows.tolist(), float(four)) == (2.0, [0, 1, 2], 4.0)
    assert (seen.step, seen.epoch, seen.batch_sizes, seen.previous_batch_sizes) == (1, 0.5, (7, 5), (6, 6))
    assert seen.limits == sizes_of().limits


def test_a_hook_sees_the_batch_that_waits_to_be_applied():
    recorder, sizes = Recorder(), sizes_of()
    sizes.request(Decision(global_batch=30))
    steps(hooks_of((recorder, 1)), 1, sizes)
    assert recorder.seen[0].global_batch == 30
    assert recorder.seen[0].batch_sizes == (6, 6)


def test_a_hook_sees_the_feasible_part_of_earlier_requests():
    first, later = Recorder(asks(workers=9, global_batch=10**9)), Recorder()
    membership = Membership(LocalWorld(4, workers=2))
    steps(hooks_of((first, 1), (later, 1), workers=4, membership=membership), 1, sizes_of(workers=4))
    assert later.seen[0].global_batch == 100
    workers = [(o.target_workers, o.least_workers, o.most_workers) for o in (*first.seen, *later.seen)]
    assert workers == [(2, 1, 4), (4, 1, 4)]


class Rows(Recorder):
    """Counts the steps that it has seen of each worker."""

    def init(self, n_workers):
        return np.zeros(n_workers, int)


@pytest.mark.parametrize("transferred", [False, True])
def test_of_a_worker_that_joins_the_next_step_is_the_first(transferred):
    recorder, sizes = Rows(every_step=True), sizes_of()
    those = hooks_of((recorder, 3))
    steps(those, 2)
    those.change_members([1], sizes)
    assert [(o.step, o.due, o.joined) for o in recorder.seen] == [(1, False, ()), (2, False, ())]
    assert those.states[0].tolist() == [2, 0]
    if transferred:
        states, waiting = those.states, those.joined
        those = hooks_of((recorder, 3))
        those.joined = waiting
        those.restart(states)
    those.change_members([], sizes)
    steps(those, 1, start=3)
    assert [(o.step, o.due, o.joined) for o in recorder.seen[2:]] == [(3, True, (1,))]
    assert those.states[0].tolist() == [3, 1]
    those.change_members([0], sizes)
    steps(those, 3, start=4)
    assert [o.joined for o in recorder.seen[3:]] == [(0,), (), ()]


def test_suspended_hooks_see_nothing():
    policy, function = Recorder(every_step=True), Recorder()
    those = hooks_of((policy, 1), (function, 1))
    those.suspended = True
    assert [outcome.decision for outcome in steps(those, 3)] == [None] * 3
    assert (those.suspended, those.watches, policy.seen, function.seen) == (True, False, [], [])
    those.suspended = False
    steps(those, 1, start=4)
    assert [[o.step for o in recorder.seen] for recorder in (policy, function)] == [[4], [4]]
    assert those.watches


def test_a_hook_sees_the_hyperparameters_that_earlier_hooks_asked_for():
    class Known:
        values, types = {"rate": 0.1, "decay": 0.5}, {"rate": np.dtype("float32"), "decay": np.dtype("float32")}

    recorder = Recorder()
    those = hooks_of((Recorder(asks(hyperparameters={"rate": 0.2})), 1), (recorder, 1), hyperparameters=Known)
    steps(those, 1)
    assert recorder.seen[0].hyperparameters == {"rate": 0.2, "decay": 0.5}
    assert recorder.seen[0].hyperparameter_types == Known.types


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_of_several_hooks_are_one_decision_in_the_drivers_order():
    those = hooks_of(
        (Recorder(asks(global_batch=20, notes=("more",))), 1),
        (Recorder(), 1),
        (Recorder(asks(shares=(3.0, 1.0), notes=("uneven",))), 2),
        (Recorder(asks(global_batch=24)), 2),
    )
    first, second = steps(those, 2)
    assert first[:2] == (Decision(20, notes=("more",)), ["hook0"])
    assert second[:2] == (Decision(24, (3.0, 1.0), notes=("more", "uneven")), ["hook0", "hook2", "hook3"])
    assert [(r.by, r.step, r.decision.global_batch, r.decision.shares) for r in second.requests] == [
        ("hook0", 2, 20, None),
        ("hook2", 2, None, (3.0, 1.0)),
        ("hook3", 2, 24, None),
    ]


decisions = st.builds(
    Decision,
    st.none() | st.integers(1, 99),
    st.none() | st.tuples(st.floats(0, 9), st.floats(0, 9)),
    st.booleans(),
    st.lists(st.sampled_from("ab"), max_size=2).map(tuple),
    st.none() | st.integers(1, 9),
    st.dictionaries(st.sampled_from("xy"), st.floats(0, 9)),
)


@given(decisions, decisions, decisions)
def test_requests_merge_in_order(a, b, c):
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(Decision(), a) == merge(a, Decision()) == a
    merged = merge(a, b)
    assert merged.global_batch == (a.global_batch if b.global_batch is None else b.global_batch)
    assert merged.shares == (a.shares if b.shares is None else b.shares)
    assert merged.workers == (a.workers if b.workers is None else b.workers)
    assert merged.stop == (a.stop or b.stop)
    assert merged.notes == a.notes + b.notes
    assert merged.hyperparameters == {**a.hyperparameters, **b.hyperparameters}
