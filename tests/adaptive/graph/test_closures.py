"""What hooks can read is recorded after each trace; differences are named, and what changes by itself is none."""

from __future__ import annotations

import random
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.graph import function_check
from adaptive.graph.closures import Record
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import FEATURES, planner

COVERS = ("adaptive/graph/expressions.py", "adaptive/graph/function_check.py", "adaptive/graph/reach.py")

W = jnp.zeros(FEATURES)


def differences(one, other):
    return [(found.path, found.judged) for found in one.differences(other)]


def closing_over(made):
    return lambda: made


def compared(one, other):
    return differences(Record([closing_over(one)]), Record([closing_over(other)]))


def test_equal_things_that_were_made_twice_do_not_differ():
    for make in (
        lambda: [1, (2.0, {"a": {3, "b"}}), np.arange(3), jnp.ones(2), float("nan"), range(4), slice(2), None],
        lambda: types.SimpleNamespace(n=3, inner=closing_over(3)),
        threading.Lock,
        object,
        lambda: np.random.default_rng(2),
        lambda: iter([1, 2]),
        lambda: np.array([1, "a", None], object),
    ):
        assert compared(make(), make()) == []


def test_the_differing_object_is_named():
    over = "which <lambda>() closes over"
    assert compared({"a": [1, 2]}, {"a": [1, 3]}) == [(f"made['a'][1], {over}", True)]
    assert compared(types.SimpleNamespace(n=3), types.SimpleNamespace(n=4))[0] == (f"made.n, {over}", True)
    assert compared(np.zeros(2), np.zeros(3)) == [(f"made, {over}", True)]
    assert compared(1, 1.0) == [(f"made, {over}", True)]
    assert compared((n for n in ()), (n for n in ())) == [(f"made, {over}", False)]


def test_a_difference_is_found_wherever_it_is():
    """Parts of an iterator are listed anew for each comparison. Among a thousand structures, some lie in memory so that
    a part gets the address of one that was compared before.
    """

    def iterator_of(seed, value):
        rng, leaves = random.Random(seed), []

        def tree(depth):
            kind = rng.randrange(5)
            if not depth or not kind:
                leaves.append([0])
                return leaves[-1]
            inner = [tree(depth - 1) for _ in range(rng.randrange(1, 4))]
            return {1: dict(enumerate(inner)), 2: tuple(inner)}.get(kind, inner)

        whole = tree(5)
        rng.choice(leaves)[0] = value
        return iter([whole])

    missed = [seed for seed in range(1000) if len(compared(iterator_of(seed, 1), iterator_of(seed, 2))) != 1]
    assert missed == []


def test_a_cycle_is_walked_once():
    def ring(n):
        found = [n]
        found.append(found)
        return found

    assert compared(ring(1), ring(1)) == []
    assert compared(ring(1), ring(2)) == [("made[0], which <lambda>() closes over", True)]


def test_long_sequences_are_compared_part_by_part_if_their_parts_have_no_equality():
    def rows(last):
        return [*(np.arange(2) for _ in range(1100)), np.array([7, last])]

    assert compared(rows(1), rows(1)) == []
    assert compared(rows(1), rows(2)) == [("made[1100], which <lambda>() closes over", True)]
    assert compared([0] * 1100, [*[0] * 1099, 1]) == [("made[1099], which <lambda>() closes over", True)]


class Unequal:
    """An object without parts that can be read, and whose comparison fails."""

    __slots__ = ()

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot be read")

    def __eq__(self, other):
        raise TypeError("cannot be compared")

    __hash__ = None


class Always(Unequal):
    """The same, equal to every other."""

    __slots__ = ()

    def __eq__(self, other):
        return True

    __hash__ = None


def test_objects_without_parts_are_compared_by_their_equality_and_otherwise_not():
    assert compared(Always(), Always()) == []
    assert compared(Unequal(), Unequal()) == [("made, which <lambda>() closes over", False)]
    assert compared(Always(), Unequal()) == [("made, which <lambda>() closes over", True)]  # of other types


def test_an_object_that_can_be_read_after_one_trace_alone_differs():
    kept = {"now": [1, 2]}
    before = Record([closing_over(kept)])
    kept["now"] = 3
    found = differences(before, Record([closing_over(kept)]))
    assert found == [("made['now'], which <lambda>() closes over", True)]
    again = Record([closing_over(kept)])
    kept["now"] = [1, 2]
    assert differences(again, Record([closing_over(kept)])) == found


def test_an_object_that_outlives_a_trace_differs_where_it_was_written_to():
    kept = {"n": 1, "table": np.zeros(4)}
    before = Record([closing_over(kept)])
    assert differences(before, Record([closing_over(kept)])) == []
    kept["n"] = 2
    kept["table"][3] = 1
    found = differences(before, Record([closing_over(kept)]))
    assert found == [(f"made['{name}'], which <lambda>() closes over", True) for name in ("n", "table")]
    assert list(before.differences(Record([closing_over(kept)]), outlasting=False)) == []


def test_of_a_large_outer_array_some_elements_are_recorded():
    kept = np.zeros(10_000_000, np.float32)
    before = Record([closing_over(kept)])
    kept[:] = 1
    assert differences(before, Record([closing_over(kept)]))


class Busy:
    """As a world is, or a logger with a thread: something in it is another at every look."""

    def __init__(self):
        self.looks, self.rank = 0, 0


def test_attributes_that_no_code_reads_do_not_matter():
    busy = Busy()
    hook = lambda: busy.rank  # noqa: E731
    before = Record([hook])
    busy.looks += 1
    assert differences(before, Record([hook])) == []
    busy.rank += 1
    assert differences(before, Record([hook])) == [("busy.rank, which <lambda>() closes over", True)]


def test_worlds_and_programs_are_never_looked_into():
    def driver(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), {}

    world = LocalWorld(2)
    data = {"y": np.arange(8, dtype=np.float32)}
    with ad.Program(driver, jnp.zeros(()), data, global_batch=4, world=world) as program:
        hook = lambda: (vars(world), program._parts.run.step, world.members)  # noqa: E731
        before = Record([hook])
        world.changes_meanwhile = 1
        program.step()
        assert differences(before, Record([hook])) == []
        del world.changes_meanwhile


def test_a_hook_may_ask_for_its_rank():
    """What changes in a world while a driver is traced is not the driver's."""
    world = LocalWorld(2)

    def driver(state, batch):
        world.looks = len(batch["y"])  # stands for what a thread of the world writes
        mean = comm.all_reduce(batch["y"].mean())
        ctrl.hook(lambda control, mean: print(mean) if world.rank == 0 else None, mean)
        return state + mean, {}

    with ad.Program(driver, jnp.zeros(()), {"y": np.arange(48.0)}, global_batch=24, world=world) as program:
        program.step()


def test_changes_by_another_thread_are_not_attributed_to_the_driver(monkeypatch):
    busy = Busy()

    def driver(state, batch):
        busy.rank = len(batch["y"])  # as it happens to be after each trace
        ctrl.hook(lambda control, value: busy.rank, comm.all_reduce(batch["y"].mean()), name="look")
        return state, {}

    with pytest.raises(ad.DriverError, match=r"hook 'look' closes over it: busy\.rank"):
        planner(driver, W).begin(8)
    monkeypatch.setattr(function_check, "sleep", lambda seconds: setattr(busy, "rank", -1))
    planner(driver, W).begin(8)


def test_a_function_that_only_a_third_size_shows_is_found_there():
    def driver(state, batch):
        sizes = [len(batch["y"]) > 20]
        ctrl.hook(lambda control, value: sizes[0] and control.stop(), comm.all_reduce(batch["y"].mean()), name="grow")
        return state, {}

    plan = planner(driver, W)
    plan.begin(8)
    with pytest.raises(ad.DriverError, match=r"for 24 examples than for 8 \(hook 'grow' closes over it: sizes\[0\]"):
        plan(24)


def test_objects_that_a_hook_writes_are_not_compared():
    def driver(state, batch):
        seen = []
        ctrl.hook(lambda control, value: seen.append(float(value)), comm.all_reduce(batch["y"].mean()))
        return state, {}

    plan = planner(driver, W)
    reference = plan.begin(8)
    hook = reference.hooks[0].hook
    hook.handler._fn.__closure__[0].cell_contents.append(1.0)
    plan(24)
