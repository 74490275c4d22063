"""`noise_batch`: the global batch follows the bounds of the noise scale."""

from __future__ import annotations

import math

import pytest

import controllers as ctrl
from monitors import NoiseScale
from tests.controllers.observations import Noise, observe


def asked(policy, *values, **kwargs):
    """The global batch that a policy without memory requests; None without a request."""
    decision, state = policy.update(observe(*values, **kwargs), policy.init(2))
    assert state == policy.init(2)
    return None if decision is None else decision.global_batch


@pytest.mark.parametrize(
    ("noise", "batch"),
    [
        (Noise(100, 90, 110), 90),  # from 64: grow to what is certain
        (Noise(100, 64, 200), None),  # 64 may be right
        (Noise(100, 50, 200), None),
        (Noise(40, 30, 50), 50),  # shrink to what is certain
        (Noise(1e6, 1e5, math.inf), 128),  # no faster than twofold
        (Noise(2, 1, 3), 32),
        (Noise(66, 66, 66), None),  # not worth it
        (Noise(math.nan, math.nan, math.nan), None),  # not known yet
        (Noise(1e3, 0, math.inf), None),  # known, but not to anything
        (Noise(math.inf, math.inf, math.inf), 128),
        (Noise(-3.0, math.nan, math.nan), None),
        (96.0, 96),
        (math.nan, None),
    ],
)
def test_the_batch_follows_the_bounds_of_the_noise_scale(noise, batch):
    assert asked(ctrl.noise_batch(), noise) == batch


@pytest.mark.parametrize("signal", [-0.42, 0.0, math.nan])
def test_without_a_signal_the_noise_scale_is_not_known(signal):
    noise = NoiseScale(821.0, 72.0, signal, 821.0, math.inf)
    for policy in (ctrl.noise_batch(), ctrl.noise_batch(confident=False)):
        assert asked(policy, noise) is None
        assert asked(policy, noise._replace(signal=0.09)) == 128


def test_settings_of_noise_batch():
    noise = Noise(100, 90, 110)
    assert asked(ctrl.noise_batch(confident=False), noise) == 100
    assert asked(ctrl.noise_batch(max_batch=80), noise) == 80
    assert asked(ctrl.noise_batch(growth=1.25), noise) == 80
    assert asked(ctrl.noise_batch(factor=0.8), noise) == 72
    assert asked(ctrl.noise_batch(dead_band=0.5), noise) is None
    assert asked(ctrl.noise_batch(multiple=32), noise) == 96
    assert asked(ctrl.noise_batch(monotone=True), Noise(10, 9, 11)) is None
    assert asked(ctrl.noise_batch(min_batch=60), Noise(10, 9, 11)) is None
    assert asked(ctrl.noise_batch(min_batch=50), Noise(10, 9, 11)) == 50
    assert asked(ctrl.noise_batch(min_batch=100), math.nan) is None


def test_a_batch_out_of_bounds_is_brought_back_even_within_the_dead_band():
    assert asked(ctrl.noise_batch(max_batch=62), Noise(64, 60, 70)) == 62


def test_batches_are_multiples_of_the_quantum_on_every_worker():
    assert asked(ctrl.noise_batch(), 100.0, quantum=8) == 96
    assert asked(ctrl.noise_batch(), 100.0, quantum=8, upper=47) == 80
    assert asked(ctrl.noise_batch(), 100.0, quantum=512, upper=40) == 80


@pytest.mark.parametrize(
    "wrong",
    [
        {"growth": 1.0},
        {"factor": math.nan},
        {"min_batch": 8, "max_batch": 4},
        {"max_batch": 0},
        {"multiple": 0},
    ],
)
@pytest.mark.parametrize("policy", [ctrl.noise_batch, ctrl.goodput_batch])
def test_impossible_settings_are_refused(policy, wrong):
    with pytest.raises(ValueError, match=rf"{policy.__name__}: .*{next(iter(wrong))}"):
        policy(**wrong)
