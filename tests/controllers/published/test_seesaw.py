"""`seesaw`: fewer steps for the same examples, and the schedule's ratio of learning rate and noise at all times."""

from __future__ import annotations

from math import pi, sqrt

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from controllers.published._seesaw import SeesawState
from tests.controllers.observations import observe


def decide(policy, lr, *, peak=1.0, batch=64, known=None):
    """The decision for a schedule whose value now is `lr`, after a peak."""
    observation = observe(batch_sizes=(batch // 2, batch // 2))._replace(hyperparameters={"lr": known})
    return policy.update(observation, SeesawState(np.asarray(peak)))


def constant(value, **options):
    return ctrl.published.seesaw(**{"base": 64, "max_batch": 1024, **options}, lr=lambda examples: value)


@pytest.mark.parametrize(
    ("lr", "options", "batch"),
    [
        (1.0, {}, 64),
        (0.51, {}, 64),
        (0.5, {}, 128),
        (0.26, {}, 128),
        (0.25, {}, 256),
        (1e-3, {}, 1024),  # at most `max_batch`
        (0.0, {}, 1024),
        (0.5, {"factor": 1.1}, round(64 * 1.1**7)),  # 1.1**7 = 1.95
        (0.36, {"rule": "linear"}, 64),  # (1 / 0.36)**(2/3) = 1.98
        (0.35, {"rule": "linear"}, 128),
        (0.2, {"max_batch": 200}, 200),
    ],
)
def test_the_batch_follows_the_decay(lr, options, batch):
    decision, state = decide(constant(lr, **options), lr)
    assert decision.hyperparameters == {"lr": lr}
    assert (decision.global_batch or 64) == batch
    assert state.peak == 1.0


def test_nothing_is_asked_for_that_holds_already():
    decision, _ = decide(constant(0.5), 0.5, batch=128, known=0.5)
    assert decision is None


def test_a_warmup_keeps_the_base_batch_and_the_peak_is_remembered():
    policy, seen = ctrl.published.seesaw(base=64, max_batch=1024, lr=lambda n: min(n / 100, 1.0) * 0.1), []
    state = policy.init(2)
    for examples in (10, 50, 100, 500):
        observation = observe(step=1)._replace(examples=examples)
        decision, state = policy.update(observation, state)
        seen.append(decision.global_batch or observation.global_batch)
    assert seen == [64] * 4
    assert state.peak == pytest.approx(0.1)


def test_meaningless_arguments_are_refused():
    cosine = optax.cosine_decay_schedule(0.1, 100)
    with pytest.raises(ValueError, match="give one schedule"):
        ctrl.published.seesaw(base=64, max_batch=128)
    with pytest.raises(ValueError, match="give one schedule"):
        ctrl.published.seesaw(base=64, max_batch=128, lr=cosine, momentum=cosine)
    with pytest.raises(ValueError, match="max_batch at least base"):
        ctrl.published.seesaw(base=64, max_batch=32, lr=cosine)
    with pytest.raises(ValueError, match="factor above 1"):
        ctrl.published.seesaw(base=64, max_batch=128, factor=1.0, lr=cosine)
    with pytest.raises(ValueError, match="rule must be one of"):
        ctrl.published.seesaw(base=64, max_batch=128, rule="adascale", lr=cosine)
    with pytest.raises(ValueError, match=r"the schedule of lr is -0\.1"):
        decide(constant(-0.1), -0.1)


def quarter_cosine(examples):
    return lambda at: 0.1 * jnp.maximum(jnp.cos(0.5 * pi * min(at / examples, 1.0)), 0.0)


# The shares are the integrals of the base batch over the batch, at most 128 times the base.
@pytest.mark.parametrize(
    ("factor", "schedule", "expected"),
    [
        (1.05, lambda examples: optax.cosine_decay_schedule(0.1, examples), 0.511),
        (2.0, lambda examples: optax.cosine_decay_schedule(0.1, examples), 0.623),
        (1.02, quarter_cosine, 2 / pi),
    ],
    ids=["fine", "doubling", "a quarter"],
)
def test_a_cosine_takes_its_share_of_the_steps_and_all_examples(factor, schedule, expected):
    examples, base = 8192, 8
    cosine = schedule(examples)

    def driver(w, batch):
        lr = ad.hyperparameter("lr", 0.1)
        tx = optax.chain(optax.scale(-lr), ctrl.scale_by_batch("sqrt", base=base))
        grad = comm.all_reduce(jnp.mean(batch["x"]))
        update, _ = tx.update(grad, tx.init(w))
        ctrl.hook(ctrl.published.seesaw(base=base, max_batch=1024, factor=factor, lr=cosine))
        return w + update, {"rate": -update / grad}

    data = {"x": np.ones((examples, 1), np.float32)}
    with ad.Program(driver, jnp.zeros(()), data, global_batch=base) as program:
        used = [(r.global_batch, float(r.metrics["rate"]), r.examples) for r in program.run(epochs=1)]
    assert sum(batch for batch, _, _ in used) >= examples
    assert len(used) * base / examples == pytest.approx(expected, rel=0.04)
    for batch, rate, seen in used[1:]:  # the ratio of rate and noise is the schedule's, at the step before
        assert rate / sqrt(batch / base) == pytest.approx(float(cosine(seen - batch)), rel=1e-4)
