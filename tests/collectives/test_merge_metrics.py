"""Metrics that are no means: merged over calls and workers they are those of all examples."""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp
import metrax
import numpy as np
import pytest
from clu import metrics as clu

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld

EXAMPLES = 24


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@flax.struct.dataclass
class Extremes(clu.Metric):
    """A user metric: the largest and the least, beside a number that all workers have."""

    largest: jax.Array
    least: jax.Array
    bins: int = 5

    @classmethod
    def of(cls, x):
        return cls(x.max(), x.min())

    def merge(self, other):
        return Extremes(jnp.maximum(self.largest, other.largest), jnp.minimum(self.least, other.least), self.bins)

    def compute(self):
        return jnp.stack([self.largest, self.least]) * self.bins


Collection = clu.Collection.create(accuracy=clu.Accuracy, mean=clu.Average.from_output("x"))


def make_data():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=EXAMPLES).astype(np.float32)
    return {"x": x, "y": (x + rng.uniform(size=EXAMPLES) > 1).astype(np.int32)}


def metrics_of(batch):
    x, y = batch["x"], batch["y"]
    return {
        "auc": metrax.AUCROC.from_model_output(x, y),
        "precision": metrax.Precision.from_model_output(x, y),
        "extremes": Extremes.of(x),
        "both": Collection.single_from_model_output(logits=jnp.stack([1 - x, x], 1), labels=y, x=x),
    }


def computed(metrics):
    return [np.asarray(x) for x in jax.tree.leaves({name: metric.compute() for name, metric in metrics.items()})]


def test_they_are_those_of_all_examples():
    def driver(state, batch):
        return state + 1, comm.merge_metrics(metrics_of(batch))

    uneven = {"shares": [3, 1, 2], "microbatch": 5, "resizable": False}
    with ad.Program(driver, 0, make_data(), global_batch=EXAMPLES, world=LocalWorld(3), **uneven) as program:
        assert len(program._parts.plan.messages) == 1
        found = program.step().metrics
        evaluated = program.evaluate(lambda state, batch: metrics_of(batch), make_data(), batch=7)
    assert found["auc"].num_thresholds == 200  # which is no sum
    for ours, also, theirs in zip(computed(found), computed(evaluated), computed(metrics_of(make_data())), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        np.testing.assert_allclose(also, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda x: clu.LastValue.from_model_output(x.mean()), r"LastValue\.total is merged neither by a sum nor"),
        (
            lambda x: clu.CollectingMetric.from_outputs(("x",)).from_model_output(x=x),
            r"values\['x'\].* neither by a sum",
        ),
        (lambda x: x.mean(), r"an array cannot be merged.*\n.*comm.all_reduce\(x, op=\"sum\"\)"),
    ],
)
def test_values_that_cannot_be_merged_are_refused(metric, says):
    with pytest.raises(ad.CollectiveError, match=rf"merge_metrics \(test_merge_metrics.py:\d+\): .*{says}"):
        ad.Program(lambda s, b: (s, {"m": comm.merge_metrics(metric(b["x"]))}), 0, make_data(), global_batch=EXAMPLES)


def test_a_kept_value_is_not_that_of_the_first_worker():
    @flax.struct.dataclass
    class First(clu.Metric):
        value: jax.Array

        def merge(self, other):
            return self

    with pytest.raises(ad.CollectiveError, match=r"First\.value is taken from one of the two metrics"):
        ad.Program(lambda s, b: (s, comm.merge_metrics(First(b["x"].mean()))), 0, make_data(), global_batch=EXAMPLES)
