"""Every driver that tries to fool the library gets its verdict, in every world."""

from __future__ import annotations

from contextlib import contextmanager

import jax
import numpy as np
import pytest

import adaptive as ad
from tests.problems import difference, stream

from . import cases_closures  # noqa: F401 (it registers its cases)
from .cases import CASES, FEATURES, Case, Checked, Refused, Right

EXAMPLES, BATCH, STEPS, SEED = 48, 24, 2, 3


def make_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) + rng.normal(size=EXAMPLES)).astype(np.float32)}


def build(case: Case, world, **defaults) -> ad.Program:
    options = {"global_batch": BATCH, "seed": SEED, "resizable": False, **defaults, **case.options}
    return ad.Program(case.driver, case.state, make_data(), world=world, **options)


@contextmanager
def comes_back(world):
    """A worker that leaves inside the block is back after it."""
    yield
    for worker_slot in set(range(world.capacity)) - set(world.members):
        world.join(worker_slot)


def of_verdict(kind):
    return [pytest.param(case, id=name) for name, case in CASES.items() if isinstance(case.verdict, kind)]


@pytest.mark.parametrize("case", of_verdict(Refused))
def test_it_is_refused(world, case):
    with pytest.raises(case.verdict.error) as caught:
        build(case, world)
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for text in case.verdict.texts:
        assert text in said


@pytest.mark.parametrize("case", of_verdict(Right))
def test_it_is_right(world, case):
    """On uneven batches, each in several calls; where there are more than two workers, the second one has none. And
    in the second step, where workers may leave, the last one is gone.
    """
    shares = [0 if worker == 1 and world.capacity > 2 else worker + 1 for worker in range(world.capacity)]
    uneven = {"shares": shares, "microbatch": 3}
    with build(case, world, **uneven) as program, comes_back(world):
        size = program.global_batch
        reports = [program.step()]
        if hasattr(world, "leave"):
            world.leave(world.capacity - 1)
        reports += [program.step() for _ in range(1, STEPS)]
        state = program.state
    order, data, expected = stream(EXAMPLES, SEED, STEPS * size), make_data(), case.state
    for number, report in enumerate(reports):
        rows = order[number * size : (number + 1) * size]
        expected, metrics = case.verdict.plain(expected, jax.tree.map(lambda a, rows=rows: a[rows], data))
        assert report.metrics.keys() == metrics.keys()
        assert difference((state if number == STEPS - 1 else expected, report.metrics), (expected, metrics)) < 1e-5


@pytest.mark.parametrize("case", of_verdict(Checked))
def test_check_says_so(world, case):
    with build(case, world) as program:
        found = program.check()
    assert not found
    assert found.verdict == case.verdict.verdict
    for text in case.verdict.texts:
        assert text in str(found)
