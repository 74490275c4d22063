"""Training is the same whatever a batch is split into: against plain optax, and against one worker."""

from __future__ import annotations

import numpy as np
import pytest

from . import problems
from .problems import adam_driver, adam_state, build, by_first, difference, force_microbatches, make_data, plain_adam

COVERS = ("adaptive/runtime/engine.py",)

STEPS, SEED = 30, 3
GLOBAL_BATCHES = (12, 20, 28)


def train_with_random_sizes(world, data, seed: int, *, random_microbatches: bool) -> tuple[list[int], problems.Params]:
    """30 steps; every few of them another global batch and another split. Returns the global batches and params."""
    rng = np.random.default_rng(seed)
    batches, splits, microbatches = [], set(), set()
    options = {"resizable": True, "microbatch": 8 if random_microbatches else None}
    with build(adam_driver, adam_state(), data, 20, world=world, **options) as program:
        program.warm_up()
        if random_microbatches:
            force_microbatches(program, seed, largest=min(8, 20 // world.size))
        while len(batches) < STEPS:
            for _ in range(min(int(rng.integers(2, 5)), STEPS - len(batches))):
                report = program.step()
                batches.append(report.global_batch)
                splits.add(report.batch_sizes)
                microbatches.update(report.microbatches)
            program.rescale(global_batch=int(rng.choice(GLOBAL_BATCHES)), shares=random_shares(rng, world.size))
        assert problems.same_everywhere(world, program.state)
        assert len(set(batches)) > 1
        assert world.size == 1 or len(splits) > 6
        assert not random_microbatches or (len(microbatches) > 12 and max(max(p, default=0) for p in microbatches) <= 8)
        return batches, program.state["params"]


def random_shares(rng: np.random.Generator, workers: int) -> list[float]:
    """Far from equal; now and then a worker has next to nothing."""
    shares = rng.dirichlet(np.full(workers, 1.5))
    shares[rng.integers(workers)] *= rng.random() > 0.3 or workers == 1
    return shares.tolist()


@pytest.mark.parametrize(
    ("precision", "random_microbatches"),
    [("float64", True), pytest.param("float32", False, marks=pytest.mark.long)],
    indirect=["precision"],
)
def test_30_adam_steps_on_random_splits_are_those_of_plain_optax(world, precision, random_microbatches):
    data = make_data()
    batches, ours = train_with_random_sizes(world, data, 7, random_microbatches=random_microbatches)

    def plainly():
        plain = plain_adam(data, batches, SEED)
        return difference(ours, plain), [difference(plain_adam(data, batches, SEED, i), plain) for i in range(3)]

    error, reordered = by_first(world, plainly)
    if precision == "float64":
        assert error < 1e-10
    assert error <= 3 * max(reordered)
    assert min(reordered) > 0  # so it measures something
