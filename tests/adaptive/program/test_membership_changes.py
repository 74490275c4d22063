"""Between two steps: who leaves is reported, who joins continues from the state of the others."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.control.membership import Leaver
from adaptive.data.iterators import from_iterator
from adaptive.program.membership_changes import AllLeave, MembershipChanges
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
        small, arrays = pickle.loads(pickle.dumps(MembershipChanges(there).pack()))
        buffers = here.engine.workers.receive_buffers()
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer[...] = array
        MembershipChanges(here).unpack((small, buffers))
        assert here.skipped.in_a_row == 2
        assert other.batch_sizes == program.batch_sizes
        assert dict(here.hyperparameters.values) == {"rate": 0.25}
        assert here.digest.value == there.digest.value
        assert float(other.state["own"]) == 0, "a new worker's own state is the initial one"
        assert course(other, 9) == course(program, 9)
        ours, theirs = plain(other.state), plain(program.state)
        for name in ("w", "n", "key"):
            np.testing.assert_array_equal(ours[name], theirs[name])


# --- who leaves, and who has joined -----------------------------------------------------------------------------------


class Process:
    """A process in a run: its world, and the parts of its program, which note what is called."""

    def __init__(self, **how):
        self.calls, self.notes, self.leavers, self.joined, self.local_state = [], [], [], [], []
        self.in_reserve = self.needs_state_transfer = self.due = self.changed = self.all_leave = False
        self.run_under_way, self.why_all_leave, self.name, self.step = True, "", "program", 3
        vars(self).update(how)
        self.clock = self.members = self.membership = self.world = self.run = self
        self.plan = SimpleNamespace(has_local=bool(self.local_state))

    def change(self, about):
        self.calls.append(("change",))
        return self.leavers

    def forget(self, places):
        self.calls.append(("forget", str(places)))

    def refresh(self):
        return self.joined

    def places(self, slots):
        return [10 * slot for slot in slots]

    def note(self, text):
        self.notes.append(text)


def called(process):
    return [name for name, *_ in process.calls]


def test_who_leaves_is_reported_with_the_reason():
    leavers = [Leaver((1,), "SIGTERM", "pid 1"), Leaver((4,), "SIGUSR1", "pid 4")]
    process = Process(due=True, leavers=leavers)
    MembershipChanges(process).apply()
    assert called(process) == ["change"]
    assert process.notes == [
        "left after step 3, upon a termination signal: worker 1 (SIGTERM to pid 1), worker 4 (SIGUSR1 to pid 4).",
    ]
    alone = Process(due=True, leavers=leavers[1:2])
    MembershipChanges(alone).apply()
    assert len(alone.notes) == 1


def test_the_run_ends_if_all_leave():
    leavers = [Leaver((k,), signal, "pid") for k, signal in enumerate(("SIGUSR1", "SIGTERM", "SIGUSR1", ""))]
    process = Process(due=True, leavers=leavers, all_leave=True, why_all_leave="all received one")
    with pytest.raises(AllLeave, match=r"all received one \(SIGTERM and SIGUSR1\)"):
        MembershipChanges(process).apply()
    assert (process.notes, called(process)) == ([], ["change"])


@pytest.mark.parametrize(
    ("joined", "local_state", "notes"),
    [
        ([1, 2], [0], ["workers 1, 2 joined, with the initial value of the state that is kept per worker."]),
        ([1], [0], ["worker 1 joined, with the initial value of the state that is kept per worker."]),
        ([1, 2], [], []),
        ([], [0], []),
    ],
)
def test_workers_that_joined_start_with_initial_state(joined, local_state, notes):
    process = Process(changed=True, joined=joined, local_state=frozenset(local_state))
    MembershipChanges(process).apply()
    assert process.calls == [("forget", str([10 * slot for slot in joined]))]
    assert process.notes == notes
