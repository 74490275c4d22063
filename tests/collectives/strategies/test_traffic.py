"""What strategies say that they send, against the messages of a program's plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
from adaptive.runtime.local_world import LocalWorld

INNER, SGD, ISLANDS = optax.sgd(0.1, momentum=0.5), optax.sgd(0.7), [[0, 2], [1]]
PARAMS = {"w": jnp.ones((40, 50)), "b": jnp.zeros(4000)}
NUMBERS = 6000
SMALL = 500  # bytes of the loss, of weights and of the status
STRATEGIES = [
    sync.synchronous(INNER),
    sync.synchronous(INNER, wire=jnp.bfloat16),
    sync.synchronous(INNER, wire="8bit"),
    sync.synchronous(INNER, wire="4bit", rounding="error_feedback"),
    sync.synchronous(INNER, op="median"),
    sync.model_averaging(INNER),
    sync.model_averaging(INNER, wire=jnp.float16),
    sync.pair_averaging(INNER),
    sync.local_steps(INNER, 3),
    sync.diloco(INNER, SGD, 3, wire="2bit"),
    sync.diloco(INNER, SGD, 3, wire=comm.top_k(64)),
    sync.diloco(INNER, SGD, 3, wire="4bit", hosts=ISLANDS),
    sync.streamed(INNER, SGD, 6, 3),
    sync.streamed(INNER, SGD, 6, 2, overlap=False, wire="4bit"),
    sync.quorum(INNER, SGD, 3),
    sync.quorum(INNER, SGD, 3, wire="8bit"),
    sync.islands(INNER, SGD, 3, ISLANDS),
    sync.islands(INNER, SGD, 3, ISLANDS, wire="4bit"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_the_plan_has_these_bytes_and_reductions(strategy):
    engine = planned(strategy)._parts.engine
    sent = [(m.gate, layout) for m, layout in zip(engine.plan.messages, engine.layouts, strict=True) if m.travels]
    traffic = strategy.traffic()
    for always in (True, False):
        parts = [part for gate, layout in sent if (gate is None) == always for part in layout.parts]
        expected = [message for message in traffic.messages if (message.every == 1) == always]
        extra = sum(part.nbytes for part in parts) - sum(message.nbytes(NUMBERS) for message in expected)
        assert 0 <= extra < SMALL
        for message in expected:
            assert any(message.op == part.op and part.nbytes >= message.nbytes(NUMBERS) - SMALL for part in parts)


def planned(strategy):
    """A program of three workers, of which no step is taken; with two leaves that have 6,000 parameters."""

    def loss_fn(params, batch):
        return (jnp.tanh(batch @ params["w"]).sum() + params["b"].sum()) / len(batch)

    def driver(state, batch):
        state, loss = strategy.step(state, jax.value_and_grad(loss_fn), batch)
        return state, {"loss": comm.all_reduce(loss)}

    options = {"global_batch": 36, "world": LocalWorld(3), "resizable": False}
    return ad.Program(
        driver,
        strategy.init(PARAMS),
        np.ones((72, 40), np.float32),
        per_worker_state=strategy.per_worker_state,
        **options,
    )


@pytest.mark.parametrize(
    ("strategy", "local_steps", "every", "beside"),
    [
        (sync.synchronous(INNER), 1, [1], [False]),
        (sync.diloco(INNER, SGD, 3), 3, [1], [False]),
        (sync.streamed(INNER, SGD, 6, 3), 2, [1], [True]),
        (sync.streamed(INNER, SGD, 6, 3, overlap=False), 2, [1], [False]),
        (sync.islands(INNER, SGD, 3, ISLANDS), 1, [1, 3, 3], [False] * 3),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_how_often_they_are_sent(strategy, local_steps, every, beside):
    traffic = strategy.traffic()
    assert traffic.local_steps == local_steps
    assert [message.every for message in traffic.messages] == every
    assert [message.beside for message in traffic.messages] == beside
