"""A run waits for the first size only; which kernels are compiled then, and how a batch is split into microbatches."""

from __future__ import annotations

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaptive.runtime.kernels import KernelOptions, Kernels
from adaptive.runtime.kernels import compiled as _compiled
from adaptive.runtime.kernels.kernels import _KEPT as KEPT
from adaptive.runtime.placement import Placement
from adaptive.runtime.segment import SegmentFunction
from tests.adaptive.drivers import HeldCompiler
from tests.speed import limit

DEADLINE = limit(60)  # seconds, for what happens in a moment


def trace(size):
    """A segment that sums a batch, on level 0."""
    shapes, results = (jax.ShapeDtypeStruct((size,), jnp.float32),), (("part", 0, 0),)
    run = lambda batch: [batch.sum()]  # noqa: E731
    return {0: SegmentFunction(run, (("batch", 0, 0),), shapes, results, result_shapes=((),))}


@pytest.fixture
def make(monkeypatch):
    """Makes kernels that take no time to compile."""
    monkeypatch.setattr(_compiled, "compile_segment", lambda function, shapes, device, **options: function)

    def make(
        *,
        workers=1,
        largest_microbatch=None,
        splittable=True,
        deterministic=False,
        trace=trace,
        devices=None,
        **more,
    ):
        kernels = Kernels(
            trace,
            list(map(Placement, devices or jax.local_devices()[:workers])),
            splittable=splittable,
            **more,
            options=KernelOptions(largest_microbatch, deterministic),
        )
        HeldCompiler(kernels)
        return kernels

    return make


def ready(kernels, local=0):
    return sorted(kernels.compiled.ready[local])


def warmed(kernels, *sizes):
    kernels.require(sizes)
    kernels._compiler.compile()
    return kernels


# --- what is compiled, and when ---------------------------------------------------------------------------------------


def test_only_the_first_size_is_waited_for(make):
    kernels = make()
    kernels.require([40])
    assert ready(kernels) == [40]
    assert kernels._compiler.asked == [(0, 32), (0, 16), (0, 8), (0, 4), (0, 2), (0, 1)]
    assert not kernels.warm
    kernels._compiler.compile()
    assert kernels.warm
    assert kernels.compiled.counters.kernels == 7
    assert kernels.compiled.counters.waited_seconds > 0


def test_every_worker_compiles_its_first_size(make):
    kernels = make(workers=3)
    kernels.require([5, 2, 9])
    assert [ready(kernels, i) for i in range(3)] == [[5], [2], [9]]
    assert {a for a in kernels._compiler.asked if a[0] == 1} == {(1, 8), (1, 4), (1, 1)}  # 2 it has


def test_a_size_is_traced_once_for_all_workers(make):
    traced = []

    def counting(size):
        traced.append(size)
        return trace(size)

    warmed(make(workers=3, trace=counting), 4, 4, 4)
    assert sorted(traced) == [1, 2, 4]


def test_all_workers_have_to_be_able_to_make_a_size(make):
    kernels = make(workers=2)
    kernels.require([4, 4])
    for local, size in kernels._compiler.asked:
        assert not kernels.makes_all
        assert not kernels.can_join()
        kernels.compiled.compile(local, size)
    assert kernels.makes_all
    assert kernels.can_join()


def test_a_size_can_be_composed_of_existing_kernels_if_they_are_few(make):
    kernels = make()
    kernels.require([6])
    assert kernels.can_make(0, 6)
    assert kernels.can_make(0, 12)
    assert not kernels.can_make(0, 7)
    kernels.extend(1000)
    kernels._compiler.compile(1)
    assert kernels.can_make(0, 7)
    assert not kernels.can_make(0, 1000)  # 166 calls of 6 and 4 of 1, where buckets will make it of 6
    kernels._compiler.compile()
    assert kernels.can_make(0, 1000)


def test_a_larger_size_adds_the_missing_buckets(make):
    kernels = warmed(make(), 5)
    kernels.extend(5)
    kernels.extend(7)
    assert kernels._compiler.asked == []
    kernels.extend(20)
    assert kernels._compiler.asked == [(0, 16), (0, 8)]
    kernels.extend(20)
    assert len(kernels._compiler.asked) == 2


def test_a_size_that_cannot_be_made_is_asked_for_once(make):
    kernels = warmed(make(), 4)
    kernels.ask([3], [4])
    assert kernels._compiler.asked == []
    other = make()
    other.require([4])
    other._compiler.asked.clear()
    other.ask([6], [4])
    other.ask([6], [4])
    assert other._compiler.asked == [(0, 2)]  # of the buckets, not one of its own


# --- the cache of a core ----------------------------------------------------------------------------------------------


def test_on_a_cpu_microbatches_are_as_large_as_its_cache_permits(make):
    kernels = make(microbatch_bytes=1000)
    kernels.require([256])
    kernels.compiled.temporaries = 256, 64 << 20  # a quarter of a MiB for each example
    assert kernels.choose(0, 256) == (256,)  # until smaller ones are compiled
    kernels.extend(1024)
    kernels._compiler.compile()
    assert max(set(ready(kernels)) - {256}) == 128  # asked for before that was known
    assert kernels.choose(0, 256) == (32,) * 8
    kernels.ask_for_own(0, 100)
    assert kernels.warm  # none
    assert kernels.choose(0, 100) == (32, 32, 32, 4)
    assert kernels.choose(0, 24) == (16, 8)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"microbatch_bytes": 64 << 20}], ids=str)
def test_the_cache_does_not_bound_microbatches_of_large_gradients_and_deterministic_ones(make, options):
    kernels = make(**options)
    kernels.require([256])
    kernels.compiled.temporaries = 256, 64 << 20
    kernels._compiler.compile()
    assert kernels.choose(0, 256) == (256,)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_no_kernel_is_larger_than_microbatch(make):
    kernels = make(largest_microbatch=6)
    kernels.require([20])
    assert ready(kernels) == [2, 6]
    assert [size for _, size in kernels._compiler.asked] == [4, 1]
    kernels._compiler.compile()
    for size in range(1, 50):
        assert max(kernels.choose(0, size)) <= 6
    kernels.extend(1000)
    assert kernels._compiler.asked == []


def test_a_batch_that_cannot_be_split_has_a_kernel_of_its_own(make):
    kernels = make(splittable=False)
    kernels.require([6])
    assert ready(kernels) == [6]
    assert kernels._compiler.asked == []
    assert kernels.choose(0, 6) == (6,)
    assert not kernels.can_make(0, 12)
    assert not kernels.makes_all
    assert kernels.can_join()  # and compiles behind that, whatever size it is given
    kernels.ask([12], [6])
    assert kernels._compiler.asked == [(0, 12)]
    kernels._compiler.compile()
    assert kernels.can_make(0, 12)
    assert kernels.choose(0, 12) == (12,)


def test_before_smaller_kernels_exist_a_batch_is_one_microbatch(make):
    kernels = make()
    kernels.require([6])
    assert kernels.choose(0, 6, at_least=2) == (6,)


@given(
    size=st.integers(1, 90),
    others=st.lists(st.integers(1, 90), max_size=3),
    microbatch=st.none() | st.integers(1, 70),
    min_microbatches=st.sampled_from([1, 2]),
    deterministic=st.booleans(),
    compiled=st.integers(0, 8),
)
@example(size=48, others=[16], microbatch=None, min_microbatches=2, deterministic=True, compiled=0)  # two calls of 8
def test_sizes_that_can_be_composed_are_composed(size, others, microbatch, min_microbatches, deterministic, compiled):
    """The first size, of its first kernels and of whatever is there of the buckets; and any other that can be made."""
    kernels = Kernels(
        trace,
        [Placement(jax.local_devices()[0])],
        splittable=True,
        min_microbatches=min_microbatches,
        options=KernelOptions(microbatch, deterministic),
    )
    held = HeldCompiler(kernels)
    kernels.compiled._compile = lambda size, device: {}
    kernels.require([size])
    for number, wanted in enumerate([size, *others]):
        if number:
            kernels.ask([wanted], [size])
        for _local, bucket in held.asked[:compiled]:
            held.compile(bucket)
        if number and not kernels.can_make(0, wanted):
            kernels.require([wanted])
        for _ in range(4):
            microbatches = kernels.choose(0, wanted, min_microbatches)
            assert sum(microbatches) == wanted
            assert set(microbatches) <= set(ready(kernels))
            assert max(microbatches) <= (microbatch or wanted)
            if number == 0 or kernels.makes_all:
                assert len(microbatches) >= min(wanted, min_microbatches)


# --- what a step asks -------------------------------------------------------------------------------------------------


def test_a_new_kernel_is_noticed_at_once(make):
    kernels = make()
    kernels.require([8])
    before = kernels.compiled.revision.number
    kernels.compiled.compile(0, 8)
    assert kernels.compiled.revision.number == before
    kernels.compiled.compile(0, 4)
    assert kernels.compiled.revision.number != before


def test_a_step_knows_whether_there_is_a_compiler_to_be_asked_about(make):
    kernels = make()
    assert not kernels.busy
    kernels.require([8])
    assert kernels.busy
    kernels.step_ended()
    assert kernels.busy
    kernels._compiler.compile()
    kernels.step_ended()  # that step ran beside it
    kernels.step_ended()
    assert not kernels.busy
    kernels.extend(64)
    assert kernels.busy


# --- a kernel of its own ---------------------------------------------------------------------------------------------


def test_a_size_that_has_stayed_gets_a_kernel_of_its_own(make):
    kernels = warmed(make(), 8)
    assert kernels.choose(0, 7) == (4, 2, 1)
    kernels.ask_for_own(0, 7)
    assert kernels.choose(0, 7) == (4, 2, 1)  # compiled in the background
    assert kernels._compiler.asked == [(0, 7)]
    kernels._compiler.compile()
    assert kernels.choose(0, 7) == (7,)
    kernels.ask_for_own(0, 7)
    assert kernels._compiler.asked == []


@pytest.mark.parametrize(
    ("options", "at_least"), [({"deterministic": True}, 1), ({"largest_microbatch": 4}, 1), ({}, 2)], ids=str
)
def test_there_is_none_in_deterministic_programs_above_microbatch_and_for_groups(make, options, at_least):
    kernels = warmed(make(**options), 8)
    kernels.ask_for_own(0, 7, at_least)
    assert kernels._compiler.asked == []


# --- what nobody wants any more ------------------------------------------------------------------------------------


def test_a_requested_size_replaces_a_pending_one(make):
    kernels = make(splittable=False, workers=2)
    kernels.require([6, 6])
    for size in range(7, 300):
        kernels.ask([size, 6], [6, 6])
    assert kernels._compiler.asked == [(0, 299)]
    kernels.ask([6, 6], [6, 6])
    assert kernels._compiler.asked == []
    assert kernels.warm


def test_a_kernel_of_its_own_replaces_an_older_pending_one(make):
    kernels = warmed(make(), 8)
    for size in (7, 6, 5):
        kernels.ask_for_own(0, size)
        assert kernels._compiler.asked == [(0, size)]


def go_through(kernels, sizes, current):
    """Request one size after another, and put each in force."""
    for size in sizes:
        kernels.ask([size], [current])
        kernels._compiler.compile()
        assert kernels.can_make(0, size)  # as announced to the other processes
        assert kernels.can_make(0, current)
        current = size
        assert kernels.choose(0, size) == (size,)


def test_kernels_that_were_compiled_longest_ago_are_let_go_but_not_those_of_pending_sizes(make):
    kernels = make(splittable=False)
    kernels.require([10])
    kernels.choose(0, 10)
    go_through(kernels, range(11, 50), 10)
    assert ready(kernels)[-KEPT:] == list(range(50 - KEPT, 50))
    kernels.ask([9], [49])
    kernels._compiler.compile()
    kernels.require_microbatches([range(100, 150)])
    kernels.ask([8], [9])  # 9 is in force, and the next is asked for before it has run
    assert kernels.can_make(0, 9)
    assert kernels.can_make(0, 49)
    assert len(ready(kernels)) <= KEPT + 3


def test_the_buckets_is_never_let_go(make):
    kernels = warmed(make(), 64)
    kernels.require_microbatches([list(range(65, 128))])
    assert kernels.choose(0, 65) == (65,)
    kernels.ask([66], [65])
    assert {1, 2, 4, 8, 16, 32, 64, 65} <= set(ready(kernels))
    assert len(ready(kernels)) <= 7 + KEPT + 3
    assert sum(kernels.choose(0, 66)) == 66
    for size in range(1, 300):
        assert kernels.can_make(0, size)
        assert sum(kernels.choose(0, size)) == size


def test_no_kernel_is_dropped_before_buckets_can_replace_it(make):
    kernels = make()
    kernels.require([64])
    kernels.require_microbatches([list(range(65, 128))])
    before = ready(kernels)
    kernels.ask([100], [64])
    assert ready(kernels) == before


# --- the background compiler ------------------------------------------------------------------------------------------


def compilers():
    return [t for t in threading.enumerate() if t.name == "adaptive-compiler"]


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


def with_a_thread(trace=trace):
    return Kernels(trace, [Placement(jax.local_devices()[0])], splittable=True)


def test_buckets_are_compiled_in_the_background():
    kernels = with_a_thread()
    try:
        kernels.require([4])
        kernels.finish()
        assert ready(kernels) == [1, 2, 4]
        assert kernels.warm
        assert not kernels._compiler.step_ended()  # what was waited for disturbed no step
        assert kernels.compiled.counters.compile_seconds > 0
        run = kernels.kernel(0, 2, 0).run
        assert float(run(np.array([3.0, 4.0], np.float32))[0]) == 7.0
    finally:
        kernels.close()


def test_an_error_in_the_background_is_raised_in_the_next_step():
    def trace_large(size):
        if size < 4:
            raise ValueError(f"no such driver for {size}")
        return trace(size)

    kernels = with_a_thread(trace_large)
    kernels.check()
    kernels.require([4])
    with pytest.raises(ValueError, match="no such driver for 2"):
        kernels.finish()
    for _ in range(2):
        with pytest.raises(ValueError, match="no such driver for 2"):
            kernels.check()
    kernels.close()


def test_the_thread_ends_with_its_owner():
    before = compilers()
    kernels = with_a_thread()
    kernels.require([2])
    kernels.finish()
    (mine,) = set(compilers()) - set(before)
    del kernels
    gc.collect()
    until(lambda: not mine.is_alive())
