"""What only several ranks can get wrong; see tests/ranks.py.

Every rank raises, so that the next test finds them all at its start.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from tests.problems import adam_driver, adam_state, build, descend, make_data, make_params, same_everywhere

pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2)]

N = 16


@pytest.fixture(scope="module", autouse=True)
def world():
    with (
        comm.JaxWorld(jax.local_devices()[:1])
        if os.environ.get("TESTS_WORLD", "").startswith("jax")
        else comm.MPIWorld() as world
    ):
        assert world.processes > 1
        yield world


def odd(world) -> bool:
    """Whether this is the rank that is not like the others."""
    return world.rank == world.processes - 1


def all_refuse(*texts, driver=adam_driver, state):
    """Every rank raises the reason why the program cannot be built."""
    with pytest.raises(ad.DisagreementError) as caught:
        build(driver, state, make_data(), N)
    for text in texts:
        assert text in str(caught.value)


# --- when the program is built ----------------------------------------------------------------------------------------


def sgd(rate):
    def driver(params, batch):
        grads = comm.all_reduce(jax.grad(lambda p: jnp.square(batch["x"] @ p["inner"]["w"]).mean())(params))
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), {}

    return driver


def test_drivers_that_differ(world):
    all_refuse(
        "driver, at test_on_ranks.py:",
        "is not the same on all ranks: rank 0: ",
        "no number that differs",
        driver=sgd(jnp.full((6, 8), 0.1 + 0.1 * odd(world))),
        state={"inner": {"w": make_params()["inner"]["w"]}},
    )


def test_states_that_differ_until_they_are_broadcast(world):
    state = {"params": make_params(seed=1 + odd(world)), "opt": adam_state()["opt"]}
    all_refuse("state['params']['inner']['w'] is not the same on all ranks", "comm.broadcast(state)", state=state)
    with build(adam_driver, comm.broadcast(state), make_data(), N, world=world) as program:
        program.step()


def test_a_rank_that_fails_while_it_builds_a_program(world):
    def driver(state, batch):
        if odd(world):
            raise OSError("no such file")
        return descend(state, batch)

    with pytest.raises(OSError if odd(world) else ad.WorkerError) as caught:
        build(driver, 0.0, make_data(), N, world=world)
    if not odd(world):
        assert f"rank {world.size - 1} failed in building" in str(caught.value)
        assert "no such file" in str(caught.value)


# --- decisions --------------------------------------------------------------------------------------------------------


def decide(world, ask):
    """A program whose hook calls `ask(control, odd)` after step 2."""

    def adapt(control, loss):
        if control.step == 2:
            ask(control, odd(world))

    def driver(state, batch):
        state, metrics = descend(state, batch)
        ctrl.hook(adapt, metrics["loss"])
        return state, metrics

    return build(driver, 0.0, make_data(), N, world=world, resizable=True)


def other_batch(control, odd):
    control.rescale(global_batch=20 + 4 * odd)


def test_a_hook_that_stops_one_rank_only(world):
    with (
        decide(world, lambda control, odd: odd and control.stop()) as program,
        pytest.raises(ad.DisagreementError) as caught,
    ):
        list(program.run(steps=5))
    assert program.steps == 2
    text = str(caught.value)
    assert "message 1 of step 3 of program" in text
    assert "before it, hook 'adapt' asked for nothing" in text
    assert f"rank {world.size - 1}: the end of run() after step 2 of program" in text
    assert "before it, hook 'adapt' asked for stop()" in text


@pytest.mark.parametrize("call", ["stop", "save"])
def test_a_stop_or_a_checkpoint_on_one_rank_only(world, tmp_path, call):
    def train():
        for report in program.run(steps=4, checkpoint=ad.Checkpoints(tmp_path) if call == "save" else None):
            if report.step == 2 and odd(world):
                getattr(program, call)()

    with build(descend, 0.0, make_data(), N, world=world) as program:
        with pytest.raises(ad.DisagreementError, match="the end of run" if call == "stop" else "a checkpoint of"):
            train()
        assert program.steps == 2


def test_hooks_that_decide_alike_at_different_speeds(world):
    """Kernels are ready earlier on one rank than on another; all take up the new sizes at the same step."""

    def adapt(control, loss):
        control.rescale(global_batch=20 + control.step, shares=range(1, control.capacity + 1))

    def driver(state, batch):
        state, metrics = descend(state, batch)
        ctrl.hook(adapt, metrics["loss"], every=3)
        return state, metrics

    with build(driver, 0.0, make_data(), N, world=world, resizable=True) as program:
        reports = []
        for report in program.run(steps=12):
            time.sleep(0.02 * odd(world))
            reports.append((report.batch_sizes, report.metrics["loss"].item(), report.notes))
        program.warm_up()  # by now at the latest they are ready everywhere
        reports += [(r.batch_sizes, r.metrics["loss"].item(), r.notes) for r in program.run(steps=6)]
    everyone = world.all_gather_bytes(repr(reports).encode())
    assert len(set(everyone)) == 1
    assert len({sizes for sizes, *_ in reports}) > 1


# --- restoring --------------------------------------------------------------------------------------------------------


class Checkpoints(NamedTuple):
    """Checkpoints of a program, and the program."""

    older: bytes
    newer: bytes
    program: ad.Program


@pytest.fixture(scope="module")
def course(world):
    with build(watched, {"w": 0.0, "ema": 1.0}, make_data(), N, world=world) as program:
        program.step()
        older = pickle.dumps(program.checkpoint())
        program.step()
        newer = pickle.dumps(program.checkpoint())
        program.step()
        yield Checkpoints(older, newer, program)


def watched(state, batch):
    w, metrics = descend(state["w"], batch)
    ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=100)
    return {"w": w, "ema": 0.9 * state["ema"] + 0.1 * mon.ema(w)}, metrics


def refuses(course, edit, error, *texts):
    """What the odd rank restores is edited. Every rank raises, and no program has changed."""
    program = course.program
    before = pickle.dumps(jax.tree.map(np.asarray, (program.state, program.steps, program.batch_sizes)))
    kept = pickle.loads(course.newer)
    kept = edit(kept) if odd(program.world) else kept
    with pytest.raises(error) as caught:
        program.restore(kept)
    for text in texts:
        assert text in str(caught.value)
    assert pickle.dumps(jax.tree.map(np.asarray, (program.state, program.steps, program.batch_sizes))) == before
    program.step()  # all are where they were, and go on together


def test_ranks_that_restore_different_checkpoints(course):
    refuses(
        course, lambda kept: {**kept, "cursor": 3}, ad.DisagreementError,
        "cursor is not the same on all ranks: rank 0: ", "the same checkpoint on",
    )  # fmt: skip


def test_a_rank_that_restores_an_older_checkpoint(course):
    refuses(course, lambda kept: pickle.loads(course.older), ad.DisagreementError, "step is not the same on all ranks")


def test_a_rank_that_cannot_restore(course):
    own = odd(course.program.world)
    refuses(course, lambda kept: {**kept, "seed": 5}, ad.CheckpointError if own else ad.WorkerError, "made with seed=5")


def test_ranks_that_disagree_can_restore_a_common_checkpoint(world):
    """The digests of decisions differ; after a restore of one checkpoint they are equal."""
    with decide(world, other_batch) as program:
        program.step()
        kept = program.checkpoint()
        with pytest.raises(ad.DisagreementError):
            list(program.run(steps=3))
        program.restore(kept)
        with pytest.raises(ad.DisagreementError):  # the hook is as it was
            list(program.run(steps=3))
        program.restore({**kept, "step": 2})  # it has its turn behind the second step
        assert [r.step for r in program.run(steps=2)] == [3, 4]


# --- evaluating -------------------------------------------------------------------------------------------------------


def mean_of_x(state, batch):
    return state * 0 + batch["x"].mean()


@pytest.fixture(scope="module")
def trained(world):
    with build(descend, 0.0, make_data(), N, world=world) as program:
        program.step()
        yield program


def test_an_evaluation_by_all_ranks_is_in_the_log_of_rank_0(trained, tmp_path):
    path, data = tmp_path / "run.jsonl", {"x": np.arange(20.0).reshape(10, 2)}
    for _ in trained.run(steps=2, record=path):
        trained.evaluate(mean_of_x, data, batch=3, log="val")
    if trained.world.rank:
        assert not path.exists()
    else:
        assert ad.log.read(path)["val"].tolist() == [9.5, 9.5]
    rows = trained.evaluate(lambda state, batch: batch["x"] * 2, data, batch=3, op="rows")
    np.testing.assert_array_equal(rows, data["x"] * 2)


def test_a_record_that_cannot_be_written_ends_nothing_on_any_rank(trained, tmp_path):
    assert len(list(trained.run(steps=2, record=tmp_path / "no such folder" / "trace.jsonl"))) == 2


# --- machines of different kinds --------------------------------------------------------------------------------------


@pytest.fixture
def heterogeneous(world, monkeypatch):
    """One rank seems to be a machine of another kind."""
    kind = "another" if odd(world) else "a kind"
    monkeypatch.setattr("adaptive.control.hosts.kind_of_machine", lambda devices: kind)


def test_on_unlike_machines_one_decides_for_all(world, heterogeneous):
    """If each rank decided by its own last bits, the run would end as soon as they matter."""
    with decide(world, other_batch) as program:
        program.warm_up()
        reports = list(program.run(steps=6))
    assert len(reports) == 6
    seen = repr([(r.batch_sizes, r.decision, r.metrics["loss"].item()) for r in reports])
    assert len(set(world.all_gather_bytes(seen.encode()))) == 1
    assert reports[-1].global_batch == 20


# --- one rank fails ---------------------------------------------------------------------------------------------------


def fails(world, program, error, step: int):
    """The odd rank raises its own error, all others hear of it, and all have the state of the step before."""
    with program, pytest.raises(error if odd(world) else ad.WorkerError) as caught:
        list(program.run(steps=6))
    worker = world.size - 1
    if odd(world):
        assert any(f"on worker {worker}" in note for note in caught.value.__notes__)
    else:
        assert f"rank {worker} failed in step {step} of {program._name}: " in str(caught.value)
        assert f"Rank {world.rank} stops too, in " in str(caught.value)
    assert program.steps == step - 1
    assert same_everywhere(world, program.state)
    return caught.value


class Failing:
    """A source whose disk fails on one rank."""

    def __init__(self, world, at: int):
        self.data, self.world, self.left = make_data(), world, at

    def __len__(self):
        return len(self.data["x"])

    def __getitem__(self, index):
        self.left -= 1
        if odd(self.world) and self.left < 0:
            raise OSError(f"disk read error at {index}")
        return jax.tree.map(lambda a: a[index], self.data)


def test_a_source_that_raises_on_one_rank(world):
    local = N // world.size + (N % world.size > world.rank)
    source = Failing(world, at=10**6)
    program = build(descend, 0.0, source, N, world=world)
    source.left = 3 * local  # enough for three steps
    error = fails(world, program, OSError, step=4)
    if odd(world):
        assert "disk read error" in str(error)
        assert any("in step 4" in note for note in error.__notes__)


def test_a_batch_that_does_not_fit_one_rank(world):
    """An error of the background compiler, on the ranks that need that size."""

    def driver(state, batch):
        if odd(world) and len(batch["x"]) == 2:
            raise MemoryError("no room for 2")
        return descend(state, batch)

    program = build(driver, 0.0, make_data(), 5 * world.size, world=world, resizable=True)
    with program, pytest.raises(MemoryError if odd(world) else ad.WorkerError):
        list(program.run(steps=10_000))  # as soon as it is found, which is beside one of the first


# --- NaNs that an update makes ----------------------------------------------------------------------------------------


def test_nans_in_the_local_state_of_one_rank_are_no_checkpoint_on_any(world):
    def driver(state, batch):
        loss, grad = comm.all_reduce(jax.value_and_grad(lambda w: jnp.square(batch["x"].sum(1) - w).mean())(state["w"]))
        count = state["count"] + 1
        own = jnp.where(ad.worker_index() == world.size - 1, jnp.log(2.5 - count), 0.0)
        return {"w": state["w"] - 0.1 * grad, "count": count, "own": own}, {"loss": loss}

    start = {"w": np.float32(0), "count": np.float32(0), "own": np.float32(0)}
    with build(driver, start, make_data(), N, per_worker_state=lambda state: state["own"]) as program:
        [program.step() for _ in range(3)]
        with pytest.raises(ad.NonFiniteError, match=r"no checkpoint of step 3: state\['own'\] holds NaNs"):
            program.checkpoint()
