"""A process that joins between two steps continues from the state of the others."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.data.iterators import from_iterator
from adaptive.program.members import MembershipChanges
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.program.resumable import Growing, plain

START = {"w": np.zeros(2, np.float32), "n": 0, "key": jax.random.key(3), "own": np.float32(0)}


def built(data, **options):
    def driver(state, batch):
        key, _ = jax.random.split(state["key"])
        loss = comm.all_reduce(batch["x"].mean())
        operators.hook("grow", Growing(), (loss,), every=3)
        rate = ad.hyperparameter("rate", 0.5)
        new = {
            "w": state["w"] + rate * loss,
            "n": state["n"] + 1,
            "key": key,
            "own": state["own"] + comm.local_mean(jnp.float32(1)),
        }
        return new, {"loss": loss, "rate": rate}

    options = {"global_batch": 5, "world": LocalWorld(2), "deterministic": True, **options}
    return ad.Program(driver, START, data, per_worker_state=lambda state: state["own"], **options)


def rows(epoch):
    yield from ({"x": np.float32(i + 100 * epoch)} for i in range(24))


SIZES_OF_ONE = {"revision", "_readiness", "_last_bounds"}  # of one process; the rest is replicated
DATA = {"arrays": lambda: {"x": np.arange(24, dtype=np.float32)}, "an iterator": lambda: from_iterator(rows)}


def course(program, steps):
    return [
        (r.step, r.epoch, r.examples, r.batch_sizes, float(r.metrics["loss"]), float(r.metrics["rate"]))
        for r in program.run(steps=steps)
    ]


@pytest.mark.parametrize("kind", DATA)
def test_a_process_that_joins_continues_as_the_others_do(kind):
    with built(DATA[kind]()) as program, built(DATA[kind](), global_batch=7, shares=(5, 2)) as other:
        for each in (program, other):
            each.warm_up()
        program.set_hyperparameters(rate=0.25)
        course(program, 7)
        course(other, 2)
        there, here = program._parts, other._parts
        there.skipped.in_a_row = 2
        there.hooks.catch_up(there.sizes)
        usual = dict(vars(there.sizes))
        vars(there.sizes).update(
            {"pending": (4, 1), "next": (1, 4), "wanted": 9, "_all_ready": True, "_all_able": True}
        )
        there.membership.asked, there.membership._ready_elsewhere = 2, 1
        there.hooks.joined[0].add(1)
        there.members.note("a note")
        small, arrays = pickle.loads(pickle.dumps(MembershipChanges(there).pack()))
        buffers = here.engine.workers.receive_buffers()
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer[...] = array
        MembershipChanges(here).unpack((small, buffers))
        for part, local in (("sizes", SIZES_OF_ONE), ("membership", {"_world", "_termination", "_revision"})):
            ours, theirs = (vars(getattr(parts, part)) for parts in (here, there))
            assert {k: repr(v) for k, v in ours.items() if k not in local} == {
                k: repr(v) for k, v in theirs.items() if k not in local
            }
        for parts in (here, there):
            vars(parts.sizes).update({k: v for k, v in usual.items() if k not in SIZES_OF_ONE})
        for get in (lambda p: p.hooks.joined, lambda p: p.run.limit, lambda p: p.run.run_id, lambda p: p.digest.asked):
            assert get(here) == get(there)
        assert "a note" in here.members.drain_events()[2]
        assert here.skipped.in_a_row == 2
        assert other.batch_sizes == program.batch_sizes
        assert dict(here.hyperparameters.values) == {"rate": 0.25}
        assert here.digest.value == there.digest.value
        assert float(other.state["own"]) == 0, "a new worker's own state is the initial one"
        assert course(other, 9) == course(program, 9)
        ours, theirs = plain(other.state), plain(program.state)
        for name in ("w", "n", "key"):
            np.testing.assert_array_equal(ours[name], theirs[name])
