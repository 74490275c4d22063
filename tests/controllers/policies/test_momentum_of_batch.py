"""A momentum that remembers as many examples with any batch."""

from __future__ import annotations

import pytest

import controllers as ctrl
from tests.controllers.observations import observe


def test_it_follows_the_batch():
    policy = ctrl.momentum_of_batch("momentum", 0.9, base=64)
    for known, wanted in [(0.9, {"momentum": pytest.approx(0.81)}), (0.81, None)]:
        observation = observe(global_batch=128)._replace(hyperparameters={"momentum": known})
        decision, _ = policy.update(observation, policy.init(2))
        assert (decision and dict(decision.hyperparameters)) == wanted


def test_a_momentum_out_of_range_is_refused():
    with pytest.raises(ValueError, match="momentum"):
        ctrl.momentum_of_batch("momentum", 1.5, base=64)
