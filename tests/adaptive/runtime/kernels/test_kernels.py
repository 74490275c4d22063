"""A run waits for the first size only; which kernels are compiled then, and how a batch is split into microbatches."""

from __future__ import annotations

import gc
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaptive.runtime.cache import compile_order
from adaptive.runtime.compile import compile_segment
from adaptive.runtime.kernels import KernelOptions, Kernels
from adaptive.runtime.kernels import choice as chooser
from adaptive.runtime.kernels import compiled as _compiled
from adaptive.runtime.kernels import kernels as _kernels
from adaptive.runtime.kernels import timings as call_times
from adaptive.runtime.kernels.worker_kernels import KEPT
from adaptive.runtime.microbatch_segments import MicrobatchSegment
from tests.adaptive.drivers import HeldCompiler
from tests.speed import limit

COVERS = (
    "adaptive/runtime/kernels/buckets.py",
    "adaptive/runtime/kernels/options.py",
    "adaptive/runtime/kernels/compiled.py",
)

DEADLINE = limit(60)  # seconds, for what happens in a moment


def trace(size):
    """A segment that sums a batch, on level 0."""
    shapes = {"batch": [jax.ShapeDtypeStruct((size,), jnp.float32)]}
    return {0: MicrobatchSegment(lambda given: {"outputs": [given["batch"][0].sum()]}, shapes, ())}


@pytest.fixture
def make(monkeypatch):
    """Makes kernels that take no time to compile."""
    monkeypatch.setattr(_compiled, "compile_segment", lambda function, shapes, device, **options: function)

    def make(
        *,
        workers=1,
        largest_microbatch=None,
        splittable=True,
        timed=True,
        compile_order=(0, 1),
        trace=trace,
        devices=None,
        **more,
    ):
        kernels = Kernels(
            trace,
            devices or jax.local_devices()[:workers],
            splittable=splittable,
            **more,
            options=KernelOptions(largest_microbatch, timed, compile_order=compile_order),
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


def measure(kernels, seconds, local=0):
    """Give kernels as many timings as they need to count as measured."""
    for size, time_of_call in seconds.items():
        for _ in range(call_times.SAMPLES):
            kernels._workers[local].chooser.times.record(size, time_of_call)
    kernels.choices[local] = _kernels.NO_CHOICE


def take_steps(kernels, size, seconds, steps, *, at_least=1, local=0):
    """Take steps as the loop does, with calls that take `seconds(size)`. Returns the calls of each step."""
    taken = []
    for _ in range(steps):
        taken.append(kernels.microbatches(local, size, at_least))
        choice = kernels.choice(local)
        assert choice.microbatches == taken[-1]
        if choice.one_by_one:
            for call in set(choice.microbatches):
                kernels.record(local, call, seconds(call))
        elif choice.timed:
            kernels.record_step(local, sum(map(seconds, choice.microbatches)))
        if kernels.busy:
            kernels.step_ended()
    return taken


# --- what calls cost --------------------------------------------------------------------------------------------------


def test_the_cost_of_a_microbatch_follows_from_short_executions(make):
    """In examples, so that workers of unlike speeds can be averaged."""
    kernels = warmed(make(), 256)
    assert kernels.overhead_examples is None
    measure(kernels, {256: 256e-5})
    kernels.choose(0, 256, 1)
    assert kernels.overhead_examples == pytest.approx(5)  # until short ones are timed: 50 microseconds
    measure(kernels, {size: (20 + size) * 1e-5 for size in (1, 2, 4, 8, 16, 32, 64, 128)})
    kernels.choose(0, 256, 1)
    assert kernels.overhead_examples == pytest.approx(20)


def test_the_cost_of_a_microbatch_is_the_mean_over_workers(make):
    kernels = warmed(make(workers=2), 256, 256)
    for local, cost in enumerate((10, 30)):
        assert kernels.overhead_examples == (pytest.approx(10) if local else None)
        measure(kernels, {256: 256e-5} | {size: (cost + size) * 1e-5 for size in (1, 2, 4, 8, 16, 32)}, local)
        kernels.choose(local, 256, 1)
    assert kernels.overhead_examples == pytest.approx(20)


def test_a_large_gradient_raises_the_expected_cost_of_a_microbatch(make):
    """Small kernels are not tried, so their cost is unknown until some have run."""
    kernels = warmed(make(microbatch_bytes=200_000_000), 16)
    measure(kernels, {16: 0.16})
    kernels.choose(0, 16, 1)
    assert kernels.overhead_examples == pytest.approx(10)  # 1 GB of traffic: 0.1 s
    measure(kernels, {1: 0.05})
    kernels.choose(0, 16, 1)
    assert kernels.overhead_examples == pytest.approx(4)


def test_batches_that_cannot_be_split_have_no_cost_of_microbatches(make):
    kernels = make(splittable=False)
    kernels.require([256])
    measure(kernels, {256: 256e-5})
    assert kernels.overhead_examples == 0


def test_a_step_that_tries_a_kernel_is_known_to_if_it_takes_longer_for_that(make):
    kernels = warmed(make(), 64)
    take_steps(kernels, 64, lambda size: size * 1e-5, 2)
    assert not kernels.tried_at_a_loss(0)
    measure(kernels, {64: 64e-5})
    (tried,) = take_steps(kernels, 64, lambda size: (20 + size) * 1e-5, 1)
    assert tried[0] < 64
    assert kernels.tried_at_a_loss(0)
    for size in set(tried):
        kernels.record(0, size, 0.5 * size * 1e-5)
    assert not kernels.tried_at_a_loss(0)


def test_a_step_of_a_slower_split_is_known_to_be_one(make):
    kernels = warmed(make(), 8)
    seconds = {8: 8.0, 4: 4.5, 2: 4.4, 1: 4.3}
    measure(kernels, seconds)
    lossy = {}
    for _ in range(40):
        (calls,) = take_steps(kernels, 8, seconds.__getitem__, 1)
        lossy[calls] = kernels.tried_at_a_loss(0)
    assert lossy == {(8,): False, (4, 4): True}


# --- what is compiled, and when ---------------------------------------------------------------------------------------


def test_only_the_first_size_is_waited_for(make):
    kernels = make()
    kernels.require([40])
    assert ready(kernels) == [40]
    assert kernels._compiler.asked == [(0, 32), (0, 8), (0, 2), (0, 1), (0, 16), (0, 4)]  # first what makes every size
    assert not kernels.warm
    kernels._compiler.compile()
    assert kernels.warm
    assert kernels.counters.kernels == 7
    assert kernels.counters.waited_seconds > 0


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


def test_stand_ins_on_one_device_share_their_kernels(make):
    kernels = make(devices=jax.local_devices()[:1] * 2)
    kernels.require([3, 3])
    assert kernels.kernel(0, 3, 0) is kernels.kernel(1, 3, 0)
    assert kernels.counters.kernels == 1


@pytest.mark.parametrize("first", [1, 2, 7, 8, 40])
def test_the_buckets_makes_every_size(make, first):
    kernels = make()
    kernels.require([first])
    assert not kernels.makes_all or first == 1
    kernels._compiler.compile()
    assert kernels.makes_all
    for size in range(1, 2 * first + 1):
        assert kernels.can_make(0, size)
        assert sum(kernels.microbatches(0, size)) == size


@pytest.mark.parametrize("first", [2, 7, 8, 40, 1000])
def test_half_of_the_buckets_makes_every_size(make, first):
    """Of a few calls more, so that sizes can change long before the whole buckets is there."""
    kernels = make()
    kernels.require([first])
    measure(kernels, {first: 1e-3 * first})  # beside which what a call costs is little
    asked = [size for _, size in kernels._compiler.asked]
    kernels._compiler.compile(*asked[: len(asked) // 2 + 1])
    assert all(kernels.can_make(0, size) for size in range(1, 2 * first + 1))


def test_a_size_that_has_to_wait_is_asked_for_with_few_kernels(make):
    kernels = make()
    kernels.require([32])
    kernels._compiler.asked.clear()
    kernels.ask([63], [32])
    assert kernels._compiler.asked == [(0, 8), (0, 2), (0, 1)]  # five more calls, and two kernels less to wait for


def test_processes_that_share_a_cache_divide_the_first_kernels(make):
    first = []
    for rank in range(2):
        kernels = make(compile_order=(rank, 2))
        kernels.require([32])
        kernels._compiler.asked.clear()
        kernels.ask([42], [32])
        assert sorted(kernels._compiler.asked) == [(0, 2), (0, 8)]
        first.append(kernels._compiler.asked[0])
    assert first == [(0, 8), (0, 2)]


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


def test_buckets_stop_growing_if_the_largest_is_no_faster(make):
    kernels = warmed(make(), 8)
    measure(kernels, {8: 8.0, 4: 4.0})
    kernels.extend(64)
    assert kernels._compiler.asked == []
    measure(kernels, {8: 5.0, 4: 4.0})  # timed again, on a quieter machine
    kernels.extend(64)
    assert [size for _, size in kernels._compiler.asked] == [64, 16, 32]


def test_a_size_that_cannot_be_made_is_asked_for_once(make):
    kernels = warmed(make(), 4)
    kernels.ask([3], [4])
    assert kernels._compiler.asked == []
    other = make()
    other.require([4])
    other._compiler.asked.clear()
    other.ask([6], [4])
    other.ask([6], [4])
    assert other._compiler.asked == [(0, 1)]  # of the buckets, not one of its own: 6 is a call of 4 and two of 1


def test_explicit_microbatches_are_the_only_ones(make):
    kernels = make(workers=2)
    kernels.require_microbatches([(3, 2, 2), (5,)])
    assert [ready(kernels, i) for i in range(2)] == [[2, 3], [5]]
    assert kernels._compiler.asked == []


def test_ranks_that_share_a_cache_begin_at_different_buckets():
    buckets = [32, 16, 8, 4, 2, 1]
    orders = [compile_order(buckets, rank, 3) for rank in range(3)]
    assert all(sorted(order) == sorted(buckets) for order in orders)
    assert sorted(r for order in orders for r in order[:2]) == sorted(buckets)
    assert compile_order(buckets, 0, 1) == buckets
    assert sorted(compile_order([2, 1], 5, 8)) == [1, 2]
    assert compile_order([], 1, 4) == []


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch_bytes", [0, 2 * _kernels.LARGE_MICROBATCH])
def test_large_gradients_are_computed_in_as_few_microbatches_as_possible(make, microbatch_bytes):
    kernels = warmed(make(microbatch_bytes=microbatch_bytes), 40)
    one = microbatch_bytes > 0
    taken = take_steps(kernels, 40, lambda size: size**2 * 1e-4, 100)
    assert (set(taken) == {(40,)}) == one
    taken = take_steps(kernels, 48, lambda size: size**2 * 1e-4, 100)
    assert ({len(calls) for calls in taken} == {2}) == one


def test_large_gradients_of_a_batch_above_the_limit_are_computed_in_several_microbatches(make):
    kernels = warmed(make(microbatch_bytes=2 * _kernels.LARGE_MICROBATCH, largest_microbatch=16), 40)
    assert set(take_steps(kernels, 40, lambda size: size * 1e-4, 20)) == {(16, 16, 8)}
    assert set(take_steps(kernels, 40, lambda size: size * 1e-4, 20, at_least=4)) == {(8, 8, 8, 8, 8)}


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_no_kernel_is_larger_than_microbatch(make):
    kernels = make(largest_microbatch=6)
    kernels.require([20])
    assert ready(kernels) == [2, 6]
    assert [size for _, size in kernels._compiler.asked] == [4, 1]
    kernels._compiler.compile()
    for size in range(1, 50):
        assert max(kernels.microbatches(0, size)) <= 6
    kernels.extend(1000)
    assert kernels._compiler.asked == []


def test_a_batch_that_cannot_be_split_has_a_kernel_of_its_own(make):
    kernels = make(splittable=False)
    kernels.require([6])
    assert ready(kernels) == [6]
    assert kernels._compiler.asked == []
    assert kernels.microbatches(0, 6) == (6,)
    assert not kernels.can_make(0, 12)
    assert not kernels.makes_all
    assert kernels.can_join()  # and compiles behind that, whatever size it is given
    kernels.ask([12], [6])
    assert kernels._compiler.asked == [(0, 12)]
    kernels._compiler.compile()
    assert kernels.can_make(0, 12)
    assert kernels.microbatches(0, 12) == (12,)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_a_batch_runs_in_at_least_the_required_number_of_microbatches(make, size):
    kernels = warmed(make(), 13)
    for _ in range(6):
        microbatches = kernels.microbatches(0, size, at_least=2)
        assert sum(microbatches) == size
        assert len(microbatches) >= min(size, 2)


def test_before_smaller_kernels_exist_a_batch_is_one_microbatch(make):
    kernels = make()
    kernels.require([6])
    assert kernels.microbatches(0, 6, at_least=2) == (6,)


@given(
    size=st.integers(1, 90),
    others=st.lists(st.integers(1, 90), max_size=3),
    microbatch=st.none() | st.integers(1, 70),
    min_microbatches=st.sampled_from([1, 2]),
    timed=st.booleans(),
    compiled=st.integers(0, 8),
)
@example(size=48, others=[16], microbatch=None, min_microbatches=2, timed=False, compiled=0)  # two calls of 8
def test_sizes_that_can_be_composed_are_composed(size, others, microbatch, min_microbatches, timed, compiled):
    """The first size, of its first kernels and of whatever is there of the buckets; and any other that can be made."""
    kernels = Kernels(
        trace,
        jax.local_devices()[:1],
        splittable=True,
        min_microbatches=min_microbatches,
        options=KernelOptions(microbatch, timed),
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
            microbatches = kernels.microbatches(0, wanted, min_microbatches)
            assert sum(microbatches) == wanted
            assert set(microbatches) <= set(ready(kernels))
            assert max(microbatches) <= (microbatch or wanted)
            if number == 0 or kernels.makes_all:
                assert len(microbatches) >= min(wanted, min_microbatches)
            for examples in set(microbatches):
                kernels.record(0, examples, 1e-3 * examples**0.5)


# --- choosing by time -------------------------------------------------------------------------------------------------


def test_without_timings_a_batch_runs_as_few_microbatches_as_possible(make):
    kernels = warmed(make(), 40)
    assert kernels.microbatches(0, 40) == (40,)
    assert kernels.microbatches(0, 41) == (40, 1)
    assert kernels.microbatches(0, 56) == (40, 16)


def test_new_kernels_are_tried_on_a_part_of_the_batch_until_all_are_measured(make):
    kernels = warmed(make(), 12)
    taken = take_steps(kernels, 12, lambda size: 1.0 + 0.1 * size, 20)
    assert all(sum(microbatches) == 12 for microbatches in taken)
    assert set(kernels._workers[0].chooser.times.seconds) == {12, 8, 4, 2, 1}
    assert kernels.microbatches(0, 12) == (12,)


def test_nothing_is_tried_while_a_compiler_runs(make):
    kernels = make()
    kernels.require([12])
    kernels._compiler.compile(8, 4, 2)
    assert not kernels.warm
    assert set(take_steps(kernels, 12, lambda size: 1.0, 100)) == {(12,)}
    kernels._compiler.compile()
    assert set(take_steps(kernels, 12, lambda size: 1.0, 20)) > {(12,), (8, 4)}


def test_measured_time_decides_over_size(make):
    kernels = warmed(make(), 8)
    measure(kernels, {8: 8.0, 4: 2.0, 2: 1.9, 1: 1.8})
    assert kernels.microbatches(0, 8) == (4, 4)


def test_workers_choose_by_their_own_timings(make):
    kernels = warmed(make(workers=2), 8, 8)
    for local, seconds in enumerate(({8: 8.0, 4: 2.0, 2: 2.0, 1: 2.0}, {8: 3.0, 4: 2.0, 2: 2.0, 1: 2.0})):
        measure(kernels, seconds, local)
    assert (kernels.microbatches(0, 8), kernels.microbatches(1, 8)) == ((4, 4), (8,))


def test_timings_that_were_all_disturbed_do_not_decide_for_long(make):
    """As those of the first steps of all, whose memory is new."""
    kernels = warmed(make(), 8)
    seconds = {8: 3.0, 4: 2.0, 2: 1.5, 1: 1.2}
    measure(kernels, seconds | {8: 90.0})
    assert kernels.microbatches(0, 8) == (4, 4)
    assert take_steps(kernels, 8, seconds.__getitem__, 60)[-1] == (8,)


def test_too_short_timings_of_small_kernels_are_corrected_soon(make):
    kernels = warmed(make(), 8)
    seconds = {8: 3.0, 4: 2.0, 2: 1.5, 1: 1.2}
    measure(kernels, seconds | {4: 1.0, 2: 0.9, 1: 0.8})
    assert kernels.microbatches(0, 8) == (4, 4)
    assert take_steps(kernels, 8, seconds.__getitem__, 60)[-1] == (8,)


def test_a_split_that_becomes_faster_is_found_while_another_is_used(make):
    kernels = warmed(make(), 8)
    seconds = {8: 3.0, 4: 2.0, 2: 1.5, 1: 1.2}
    measure(kernels, seconds)
    assert take_steps(kernels, 8, seconds.__getitem__, 400)[-1] == (8,)
    seconds[8] = 6.0
    assert take_steps(kernels, 8, seconds.__getitem__, 6000)[-1] == (4, 4)


def test_sizes_that_change_again_and_again_are_seldom_compared(make):
    """Each comparison costs some steps; where sizes do not stay, that would never be earned."""
    kernels = warmed(make(), 64)
    timed = lost = 0
    for number in range(100):
        for _ in range(50):
            take_steps(kernels, 33 + number % 32, lambda size: 10.0 + size, 1)
            timed += number >= 50 and kernels.choice(0).timed
            lost += number >= 50 and kernels.tried_at_a_loss(0)
    assert 0 < timed < 0.1 * 2500
    assert lost < 0.05 * 2500


def test_steps_beside_a_compilation_are_not_timed(make):
    kernels = make()
    kernels.few_cores = True
    kernels.require([8])  # asks for the buckets
    take_steps(kernels, 8, lambda size: 5.0, 20)
    assert kernels._workers[0].chooser.times.seconds == {}
    kernels._compiler.compile()
    take_steps(kernels, 8, lambda size: 1.0, 20)
    assert kernels._workers[0].chooser.times.seconds[8] == 1.0


def test_mixed_microbatches_are_timed_one_by_one_while_some_are_unknown(make):
    kernels = warmed(make(), 12)
    kernels.microbatches(0, 12)
    kernels.microbatches(0, 12)
    kernels.microbatches(0, 12)
    trial = kernels.choice(0)
    assert (trial.microbatches, trial.one_by_one, trial.timed) == ((12,), False, True)
    measure(kernels, {12: 1.0})
    kernels.microbatches(0, 12)
    assert kernels.choice(0).microbatches == (8, 4)
    assert kernels.choice(0).one_by_one
    measure(kernels, {8: 1.0, 4: 1.0})
    kernels.microbatches(0, 12)
    assert kernels.choice(0).microbatches[0] == 2
    measure(kernels, {2: 1.0, 1: 1.0})
    kernels.microbatches(0, 12)
    assert not kernels.choice(0).one_by_one


def test_unrecorded_trials_are_requested_seldom(make):
    """As with code that takes no times."""
    kernels = warmed(make(), 12)
    timed = []
    for _ in range(400):
        kernels.microbatches(0, 12)
        timed.append(kernels.choice(0).timed)
    assert sum(timed[30:]) < 10


def test_deterministic_microbatches_depend_on_the_size_alone(make):
    kernels = warmed(make(timed=False), 40)
    sizes = (40, 24, 7)
    before = [kernels.microbatches(0, size) for size in sizes]
    measure(kernels, {32: 1.0, 16: 99.0, 8: 1e-3, 4: 99.0, 2: 99.0, 1: 1e-6})
    for _ in range(300):
        assert kernels.microbatches(0, 40) == (32, 8)
        assert not kernels.choice(0).timed
    assert before == [kernels.microbatches(0, size) for size in sizes] == [(32, 8), (16, 8), (4, 2, 1)]
    assert kernels._compiler.asked == []


def test_deterministic_microbatches_do_not_depend_on_earlier_sizes(make):
    microbatches = []
    for before in ([24], [7, 24], [100, 5, 24]):
        kernels = make(timed=False)
        for size in before:
            kernels.require([size])
        microbatches.append(kernels.microbatches(0, 24))
    assert microbatches == [(16, 8)] * 3


# --- what a step asks -------------------------------------------------------------------------------------------------


def calls_of(function):
    """How many Python functions run while this one does."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls) - 1


@pytest.mark.parametrize("options", [{}, {"timed": False}, {"splittable": False}], ids=str)
def test_a_steady_step_chooses_no_microbatches(make, options):
    kernels = warmed(make(**options), 8)
    take_steps(kernels, 8, lambda size: 1.0, 200)
    counts = [calls_of(lambda: kernels.microbatches(0, 8)) for _ in range(100)]
    assert sum(count > 1 for count in counts) <= 10
    assert not kernels.busy


def test_a_choice_stays_the_same_object(make):
    kernels = warmed(make(), 8)
    take_steps(kernels, 8, lambda size: 1.0, 200)
    choices = []
    for _ in range(200):
        take_steps(kernels, 8, lambda size: 1.0, 1)
        choices.append(kernels.choice(0))
    assert len({id(choice) for choice in choices}) <= 4


def test_a_new_kernel_is_noticed_at_once(make):
    kernels = make(timed=True)
    kernels.require([8])
    take_steps(kernels, 8, lambda size: 1.0, 30)
    assert kernels.choices[0].steps or kernels.choices[0].timed
    kernels.compiled.compile(0, 4)
    assert kernels.choices[0] is _kernels.NO_CHOICE


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


# --- an exact kernel --------------------------------------------------------------------------------------------------


def steps_at(kernels, size, steps):
    for _ in range(steps):
        kernels.microbatches(0, size)


@pytest.fixture
def pays(make):
    """Kernels that cost 10 s each, for calls that cost 1 s whatever their size."""
    kernels = warmed(make(), 8)
    measure(kernels, dict.fromkeys((8, 4, 2, 1), 1.0))
    kernels.counters.compile_seconds = 10.0 * kernels.counters.kernels
    return kernels


def test_a_kernel_for_an_exact_size_is_compiled_when_it_pays(pays):
    steps_at(pays, 7, 3)  # 3 calls, where one would do: 3 s, of which 1.25 s are saved
    assert pays._compiler.asked == []
    steps_at(pays, 7, 3 * chooser._LONGEST)
    assert pays._compiler.asked == [(0, 7)]
    pays._compiler.compile()
    measure(pays, {7: 1.0})
    assert pays.microbatches(0, 7) == (7,)


def test_an_exact_kernel_is_asked_for_once_it_would_have_saved_the_seconds_of_one_compilation(pays):
    """4 + 2 + 1 take 3 s, one call of 7 would take 7 / 4 of a second, and a kernel 10 s: 8 steps save no more."""
    for _ in range(9):  # the first is of another size
        pays.choose(0, 7, 1)
    assert pays._workers[0].chooser.steps_at_size == 8
    assert pays._compiler.asked == []
    pays.choose(0, 7, 1)
    assert pays._compiler.asked == [(0, 7)]


def test_a_kernel_that_does_not_pay_is_not_compiled(make):
    kernels = warmed(make(), 8)
    measure(kernels, {8: 0.8, 4: 0.4, 2: 0.2, 1: 0.1})  # calls cost what their examples do
    kernels.counters.compile_seconds = 1e-6 * kernels.counters.kernels
    steps_at(kernels, 7, 3 * chooser._LONGEST)
    assert kernels._compiler.asked == []


def test_no_exact_kernel_is_larger_than_the_micro_batch(make):
    kernels = warmed(make(largest_microbatch=4), 8)
    measure(kernels, dict.fromkeys((4, 2, 1), 1.0))
    kernels.counters.compile_seconds = 1e-6
    steps_at(kernels, 7, 3 * chooser._LONGEST)
    assert kernels._compiler.asked == []


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 2), st.floats(1e-4, 1)), min_size=1, max_size=60))
def test_under_any_timings_microbatches_sum_to_the_batch(steps):
    kernels = Kernels(trace, jax.local_devices()[:1], splittable=True)
    HeldCompiler(kernels)
    for bucket in (16, 8, 4, 2, 1):
        kernels.compiled.ready[0][bucket] = {}
    for size, at_least, seconds in steps:
        for _ in range(3):
            microbatches = kernels.microbatches(0, size, at_least)
            assert sum(microbatches) == size
            assert len(microbatches) >= min(size, at_least)
            assert set(microbatches) <= set(ready(kernels))
            for microbatch in set(microbatches):
                kernels.record(0, microbatch, seconds)


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


def test_a_bucket_stays_requested(make):
    kernels = make()
    kernels.require([6])
    kernels.ask([7], [6])
    kernels.ask([6], [6])
    assert sorted(kernels._compiler.asked) == [(0, 1), (0, 2), (0, 4)]


def test_an_exact_kernel_replaces_an_older_pending_one(pays):
    for size in (7, 6, 5):
        steps_at(pays, size, 3 * chooser._LONGEST)
        assert pays._compiler.asked == [(0, size)]


def go_through(kernels, sizes, current):
    """Request one size after another, and put each in force."""
    for size in sizes:
        kernels.ask([size], [current])
        kernels._compiler.compile()
        assert kernels.can_make(0, size)  # as announced to the other processes
        assert kernels.can_make(0, current)
        current = size
        assert kernels.microbatches(0, size) == (size,)


def test_kernels_that_were_used_longest_ago_are_let_go(make):
    kernels = make(splittable=False)
    kernels.require([10])
    kernels.microbatches(0, 10)
    go_through(kernels, range(11, 100), 10)
    assert len(ready(kernels)) <= KEPT + 3
    assert ready(kernels)[-KEPT:] == list(range(100 - KEPT, 100))
    go_through(kernels, [90, 100, 101, 102, 103, 104, 105, 106], 99)
    assert 90 in ready(kernels)  # used since
    assert 85 not in ready(kernels)


def test_kernels_of_pending_sizes_are_kept_among_many_sizes(make):
    kernels = make(splittable=False)
    kernels.require([10])
    kernels.microbatches(0, 10)
    kernels.require_microbatches([range(100, 150)])
    kernels.ask([11], [10])
    kernels._compiler.compile()
    for _ in range(3):  # other ranks may take long over theirs
        kernels.ask([11], [10])
        assert kernels.can_make(0, 11)
        assert kernels.can_make(0, 10)
    kernels.ask([12], [11])  # it is taken on, and the next is asked for before it has run
    assert kernels.can_make(0, 11)
    assert len(ready(kernels)) <= KEPT + 3


def test_the_buckets_is_never_let_go(make):
    kernels = warmed(make(), 64)
    kernels.require_microbatches([list(range(65, 128))])
    assert kernels.microbatches(0, 65) == (65,)
    kernels.ask([66], [65])
    assert {1, 2, 4, 8, 16, 32, 64, 65} <= set(ready(kernels))
    assert len(ready(kernels)) <= 7 + KEPT + 3
    assert sum(kernels.microbatches(0, 66)) == 66
    for size in range(1, 300):
        assert kernels.can_make(0, size)
        assert sum(kernels.microbatches(0, size)) == size


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
    return Kernels(trace, jax.local_devices()[:1], splittable=True)


def test_buckets_are_compiled_in_the_background():
    kernels = with_a_thread()
    try:
        kernels.require([4])
        kernels.finish()
        assert ready(kernels) == [1, 2, 4]
        assert kernels.warm
        assert kernels.counters.compile_seconds > 0
        run = kernels.kernel(0, 2, 0).run
        assert float(run({"batch": [np.array([3.0, 4.0], np.float32)]})["outputs"][0]) == 7.0
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
    with pytest.raises(ValueError, match="no such driver for 1"):
        kernels.finish()
    for _ in range(2):
        with pytest.raises(ValueError, match="no such driver for 1"):
            kernels.check()
    kernels.close()


def test_closing_ends_the_thread():
    before = compilers()
    kernels = with_a_thread()
    kernels.require([64])
    (mine,) = set(compilers()) - set(before)
    kernels.close()
    until(lambda: not mine.is_alive())
    kernels.close()
    kernels.ask([48], [64])  # nothing comes of it, and nothing breaks


def test_the_thread_ends_with_its_owner():
    before = compilers()
    kernels = with_a_thread()
    kernels.require([2])
    kernels.finish()
    (mine,) = set(compilers()) - set(before)
    del kernels
    gc.collect()
    until(lambda: not mine.is_alive())


def test_a_segment_is_compiled_for_its_device():
    device = jax.local_devices()[2]
    run = compile_segment(lambda x: x + 1, (jax.ShapeDtypeStruct((2,), jnp.float32),), device)
    assert run(np.zeros(2, np.float32)).devices() == {device}
