"""A worker keeps the kernels that its next steps may use, and the last used of the others."""

from __future__ import annotations

from adaptive.runtime.kernels.choice import Chooser
from adaptive.runtime.kernels.timings import SAMPLES
from adaptive.runtime.kernels.worker_kernels import KEPT, WorkerKernels

BUCKETS = {1, 2, 4}


def worker(used):
    made = WorkerKernels(Chooser())
    for size in used:
        made.note_used((size,))
    return made


def test_the_least_recently_used_kernels_are_dropped_first():
    used = list(range(10, 10 + KEPT + 3))
    made = worker([*used, 10])  # 10 was used first and last
    assert made.forget_outdated([*used, *BUCKETS], BUCKETS) == [11, 12, 13]


def test_kernels_that_were_never_used_are_dropped_before_all_others():
    used = list(range(10, 10 + KEPT))
    assert worker(used).forget_outdated([*used, 99], BUCKETS) == [99]


def test_kernels_that_the_next_steps_may_use_are_kept():
    used = list(range(10, 10 + KEPT + 4))
    made = worker(used)
    made.asked, made.current, made.exact = 10, 11, 12
    made.chooser.fixed(13, 1, (13,))
    assert made.forget_outdated(used, BUCKETS) == []
    made.asked = 0
    assert made.forget_outdated([*used, 50], BUCKETS) == [50, 10]


def test_timings_of_a_dropped_kernel_are_forgotten():
    used = list(range(10, 10 + KEPT + 1))
    made = worker(used)
    for _ in range(SAMPLES):
        made.chooser.times.record(10, 1.0)
    assert 10 in made.chooser.times.seconds
    assert made.forget_outdated(used, BUCKETS) == [10]
    assert 10 not in made.chooser.times.seconds
