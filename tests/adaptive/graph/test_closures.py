"""What hooks capture is copied after each trace; differences are named, and what changes by itself is none."""

from __future__ import annotations

import functools
import threading
import types
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.graph.closures import variables_of
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import FEATURES, planner

COVERS = ("adaptive/graph/expressions.py",)

W = jnp.zeros(FEATURES)


def captured(function):
    return {v.name: v.copy for v in variables_of([function]) if not v.name.startswith("code of")}


def copy_of(made):
    return captured(lambda: made)["made, which <lambda>() closes over"]


@pytest.mark.parametrize("one", [3, 2.5, "a", None, [1, (2.0, {"a": {3, "b"}})], np.arange(3), range(4), slice(2)])
@pytest.mark.parametrize("other", [4, 3.0, "b", [1, (2.0, {"a": {3, "c"}})], np.arange(4), np.arange(3.0), range(5)])
def test_copies_are_equal_if_the_values_are(one, other):
    assert copy_of(one) == copy_of(one) is not None
    assert copy_of(one) != copy_of(other)


def test_objects_of_other_kinds_have_no_copy():
    for thing in (threading.Lock(), types.SimpleNamespace(n=3), [object()], np.array([1, "a", None], object)):
        assert copy_of(thing) is None


def test_a_copy_stays_when_the_object_changes():
    kept = {"n": [1], "table": np.zeros(4)}
    before = copy_of(kept)
    kept["n"].append(2)
    assert copy_of(kept) != before
    kept["n"].pop()
    assert copy_of(kept) == before
    kept["table"][3] = 1
    assert copy_of(kept) != before


def test_of_long_containers_and_arrays_some_elements_are_copied():
    assert copy_of([0] * 100_000) != copy_of([0] * 100_001)
    assert copy_of([1, *[0] * 100_000]) != copy_of([0] * 100_001)
    large = np.zeros(10_000_000, np.float32)
    before = copy_of(large)
    large[:] = 1
    assert copy_of(large) != before


def test_a_container_that_holds_itself_has_no_copy():
    ring = [1]
    ring.append(ring)
    assert copy_of(ring) is None


def test_all_ways_to_capture_are_named():
    number = 3

    class Growing:
        shared = 1

        def __init__(self):
            self.n = 4

        def adapt(self, control):
            return self.n

        def __call__(self, control):
            return self.n

    def grow(size, control, least=1, *, most=2):
        return number, (later if control else None)

    assert captured(grow)["number, which grow() closes over"] == ("int", "3")
    assert captured(grow)["least, a default argument of grow()"] == ("int", "1")
    assert captured(grow)["most, a default argument of grow()"] == ("int", "2")
    assert captured(functools.partial(grow, 5))["an argument of functools.partial"]
    assert captured(functools.partial(grow, 5))["number, which grow() closes over"] == ("int", "3")
    assert captured(Growing().adapt)["self.n of adapt()"] == ("int", "4")
    assert captured(Growing())["Growing.n of Growing()"] == ("int", "4")
    assert captured(lambda: grow)["number, which grow() closes over"] == ("int", "3")
    later = number  # an empty closure variable until here


def test_objects_that_are_not_called_are_not_read():
    class Touchy:
        @property
        def __dict__(self):
            raise AssertionError

    touchy = Touchy()
    assert copy_of(touchy) is None


class Recording(dict):
    """A dict that fails if any thread but one walks it, as one that is changed meanwhile may."""

    owner = None

    def _check(self):
        if self.owner is not None:
            raise RuntimeError("dictionary changed size during iteration")

    def __iter__(self):
        self._check()
        return super().__iter__()

    def items(self):
        self._check()
        return super().items()

    keys = values = copy = items


def test_further_sizes_read_none_of_the_objects_that_a_hook_writes():
    history, seen = Recording(), []

    def record(control, value, history=history):
        history[control.step] = seen[:]

    def driver(state, batch):
        mine = []
        ctrl.hook(record, comm.all_reduce(batch["y"].mean()), name="record")
        ctrl.hook(lambda control, value: mine.append(float(value)), comm.all_reduce(batch["y"].mean()), name="list")
        return state, {}

    plan = planner(driver, W)
    reference = plan.begin(8)
    history.owner = threading.current_thread()
    reference.hooks[1].hook.handler._fn.__closure__[0].cell_contents.append(1.0)
    plan(24)


@contextmanager
def written_to(history):
    """Another thread changes the dict's size all the time, as a hook does while the compiler's thread traces."""
    end = threading.Event()

    def write():
        while not end.is_set():
            history.update((i, [i]) for i in range(500))
            history.clear()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        end.set()
        writer.join()


def test_a_hook_may_record_into_a_dict_while_the_driver_is_traced():
    history = {}

    def driver(state, batch):
        ctrl.hook(lambda control, value: history.update(value), comm.all_reduce(batch["y"].mean()))
        return state, {}

    with written_to(history):
        for _ in range(3):
            plan = planner(driver, W)
            plan.begin(8)
            for examples in range(1, 8):
                plan(examples)


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


def test_attributes_that_change_by_themselves_do_not_count():
    class Busy:
        count = 0

        def __call__(self, control, value):
            return self.count

    busy = Busy()

    def driver(state, batch):
        busy.count = busy.count + 1
        ctrl.hook(busy, comm.all_reduce(batch["y"].mean()))
        return state, {}

    planner(driver, W).begin(8)
