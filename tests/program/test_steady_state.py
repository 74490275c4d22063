"""Compiling: never in steady state, never for a size made of compiled buckets, and never in front of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import controllers as ctrl
from tests.speed import limit

from .problems import build, descend, make_data, same_everywhere, warm

COMPILING = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Grows by one for everything that XLA compiles, in any thread."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **_) -> None:
        if event == COMPILING:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def observed(state, batch):
    """Training, with a hook that reads a value in every step."""
    state, metrics = descend(state, batch)
    ctrl.hook(lambda control, loss: None, metrics["loss"], name="watch")
    return state, metrics


def test_the_listener_hears_a_compiler(compiles):
    jax.jit(lambda x: x * 3 + len(compiles))(np.ones(3))
    assert compiles


def test_nothing_is_compiled_in_steady_state(world, compiles):
    with build(observed, 0.0, make_data(), 24, world=world, resizable=True) as program:
        warm(program)
        before = program.step()
        compiles.clear()
        after = [program.step() for _ in range(40)][-1]
    assert not compiles
    assert (after.kernels, after.compile_seconds) == (before.kernels, before.compile_seconds)
    assert after.waited_seconds == before.waited_seconds


def test_sizes_never_seen_compile_nothing_and_hold_from_the_next_step(world, compiles):
    """20 decisions of a hook, all of them new, each taken up by all workers in the very next step."""
    rng, n = np.random.default_rng(0), world.size
    most = 2 << ((64 // n).bit_length() - 1)  # twice the largest bucket; for larger batches there are more
    asked: dict[int, tuple[int, ...]] = {}

    def resize(control):
        sizes = control.batch_sizes
        while sizes in (control.batch_sizes, *asked.values()) or max(sizes) >= most:
            total = int(rng.integers(13, 64))
            cuts = np.sort(rng.choice(np.arange(1, total), n - 1, replace=False))
            sizes = tuple(int(s) for s in np.diff([0, *cuts, total]))
        control.rescale(global_batch=sum(sizes), shares=sizes)
        asked[control.step] = sizes

    def driver(state, batch):
        ctrl.hook(resize, every=3)
        return descend(state, batch)

    with build(driver, 0.0, make_data(), 64, world=world, resizable=True) as program:
        warm(program)
        before = program.step()
        compiles.clear()
        reports = {r.step: r for r in program.run(steps=60)}
    assert len(asked) >= 20
    assert len(set(asked.values())) == len(asked)
    for step, sizes in asked.items():
        if step + 1 in reports:
            assert reports[step + 1].batch_sizes == sizes
    assert same_everywhere(world, [(r.batch_sizes, r.metrics["loss"]) for r in reports.values()])
    last = reports[max(reports)]
    assert not compiles
    assert last.kernels == before.kernels
    assert last.waited_seconds == before.waited_seconds


def test_a_driver_that_cannot_be_split_waits_for_its_kernel(world, compiles):
    """All examples of a worker in one microbatch: then a new size is a new kernel, also compiled in the background."""
    import collectives as comm

    def driver(state, batch):
        state, metrics = descend(state, batch)
        return state, {**metrics, "first": comm.all_gather(batch["x"][0, 0])}

    n = world.size
    with build(driver, 0.0, make_data(), 8 * n, world=world, resizable=True) as program:
        assert not program._parts.plan.splittable
        first = program.step()
        program.rescale(global_batch=12 * n)
        deadline = time.monotonic() + limit(60)
        while program.global_batch == 8 * n:
            report = program.step()
            assert time.monotonic() < deadline
        report = program.step()
    assert report.batch_sizes == (12,) * n
    assert report.waited_seconds == first.waited_seconds
    assert set(report.microbatches) == {(12,)}
