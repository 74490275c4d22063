"""`noise_workers`: the number of workers follows the bounds of the noise scale."""

from __future__ import annotations

import math

import pytest

import controllers as ctrl
from tests.controllers.observations import Noise, observe


def asked(policy, *values, there=2, target=None, most=16, least=1, batch=None, **kwargs):
    """The number of workers and the batch that a policy without memory requests; None without a request."""
    batch_sizes = (32,) * there + (0,) * (16 - there)
    numbers = (there if target is None else target, least, most)
    seen = observe(
        *values,
        batch_sizes=batch_sizes,
        members=tuple(range(there)),
        workers=numbers,
        global_batch=32 * there if batch is None else batch,
        **kwargs,
    )
    decision, state = policy.update(seen, policy.init(16))
    assert state == ()
    return None if decision is None else (decision.workers, decision.global_batch)


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (Noise(110, 100, 120), (3, 96)),  # from 2 of 32 each: grow to what is certain
        (Noise(110, 60, 120), None),  # 2 may be right
        (Noise(10, 5, 20), (1, 32)),  # shrink to what is certain
        (Noise(10, 5, 70), None),
        (Noise(1e6, 1e5, math.inf), (4, 128)),  # no faster than twofold
        (Noise(86, 86, 86), None),  # not worth it: 2.69 workers
        (Noise(87, 87, 87), (3, 96)),  # worth it: 2.72
        (Noise(math.nan, math.nan, math.nan), None),  # not known yet
        (Noise(1e3, 0, math.inf), None),  # known, but not to anything
        (Noise(math.inf, math.inf, math.inf), (4, 128)),
        (Noise(-3.0, math.nan, math.nan), None),
        (128.0, (4, 128)),
    ],
)
def test_workers_follow_the_bounds_of_the_noise_scale(noise, expected):
    assert asked(ctrl.noise_workers(32), noise) == expected


def test_settings_of_noise_workers():
    noise = Noise(160, 128, 192)
    assert asked(ctrl.noise_workers(32, confident=False, growth=4), noise) == (5, 160)
    assert asked(ctrl.noise_workers(32, max_workers=3), noise) == (3, 96)
    assert asked(ctrl.noise_workers(32, growth=1.5), noise) == (3, 96)
    assert asked(ctrl.noise_workers(32, growth=1.01), noise) == (3, 96)  # one more in any case
    assert asked(ctrl.noise_workers(32, factor=0.75), noise) == (3, 96)
    assert asked(ctrl.noise_workers(32, dead_band=1.0), noise) is None
    assert asked(ctrl.noise_workers(32, monotone=True), 1.0) is None
    assert asked(ctrl.noise_workers(32, min_workers=2), 1.0) is None
    assert asked(ctrl.noise_workers(32, min_workers=4), math.nan) is None
    assert asked(ctrl.noise_workers(32, min_workers=4), 1.0) == (4, 128)
    assert asked(ctrl.noise_workers(32), 1.0, there=8) == (4, 128)
    assert asked(ctrl.noise_workers(32), noise, due=False) is None


def test_the_feasible_number_of_workers_takes_precedence():
    assert asked(ctrl.noise_workers(32, min_workers=4), 1e4, most=3) == (3, 96)
    assert asked(ctrl.noise_workers(32), 1e4, most=2) is None
    assert asked(ctrl.noise_workers(32), 1.0, there=6, least=5) == (5, 160)
    assert asked(ctrl.noise_workers(32, max_workers=2), 64.0, there=4) == (2, 64)  # brought back within bounds


def test_the_batch_is_brought_to_that_of_the_workers_and_asked_for_once():
    assert asked(ctrl.noise_workers(32), 64.0, batch=100) == (2, 64)
    assert asked(ctrl.noise_workers(32), 64.0, batch=64) is None
    assert asked(ctrl.noise_workers(32), 128.0, target=4, batch=64) is None  # on their way
    assert asked(ctrl.noise_workers(32), 256.0, target=4, batch=64) is None  # and no more before they are there
    assert asked(ctrl.noise_workers(32), 96.0, target=4, batch=64) == (3, 96)
    assert asked(ctrl.noise_workers(200), 400.0, batch=200, upper=100) is None  # all that they may hold


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples_per_worker": 0},
        {"examples_per_worker": 1.5},
        {"examples_per_worker": math.nan},
        {"growth": 1.0},
        {"dead_band": -0.1},
        {"factor": 0},
        {"min_workers": 0},
        {"min_workers": 3, "max_workers": 2},
        {"max_workers": 0},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="noise_workers"):
        ctrl.noise_workers(**({"examples_per_worker": 8} | wrong))
