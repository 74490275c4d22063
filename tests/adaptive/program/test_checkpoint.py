"""A checkpoint is all that a program is: what goes on from it takes the course that it would have taken."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive.base.decision import Decision
from adaptive.operators.sources import Source, read
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import Recorder, make_data, mean_loss
from tests.stored import stored

W = np.array([0.3, -0.2, 0.1], np.float32)
PLACE = Source("place", lambda r: 1.0 + r.worker)


class Growing(Recorder):
    """A policy with a state: after every third step it asks for as many examples more as it has seen steps."""

    def __init__(self):
        super().__init__(every_step=True)

    def init(self, n_workers):
        return {"steps": 0, "losses": np.zeros(n_workers), "on device": jnp.zeros(())}

    def __call__(self, observation, state):
        self.seen.append(observation)
        new = {
            "steps": state["steps"] + 1,
            "losses": state["losses"] + observation.values[0],
            "on device": state["on device"] + 1,
        }
        decision = Decision(global_batch=observation.global_batch + new["steps"]) if observation.due else None
        return decision, new


def driver_of(handler):
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(state["w"], batch)
        loss = mon.ema(comm.all_reduce(loss))
        operators.hook("grow", handler, (loss,), every=3)
        key, _ = jax.random.split(state["key"])
        w = state["w"] - 0.1 * comm.all_reduce(grads)
        return {"key": key, "n": state["n"] + 1, "w": w}, {"loss": loss}

    return driver


def state():
    return {"key": jax.random.key(3), "n": 0, "w": W}


def build(driver, state, workers=2, **options):
    options = {"global_batch": 5, "world": LocalWorld(workers), "deterministic": True, **options}
    return ad.Program(driver, state, make_data(24), **options)


def plain(tree):
    return jax.tree.map(
        lambda a: np.asarray(jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a), tree
    )


def course(program, steps):
    program.warm_up()
    reports = list(program.run(steps=steps))
    return [(r.step, r.epoch, r.examples, r.batch_sizes, float(r.metrics["loss"])) for r in reports]


def test_what_goes_on_from_a_checkpoint_takes_the_same_course_to_the_last_bit():
    with build(driver_of(Growing()), state()) as program:
        course(program, 5)
        kept = pickle.loads(pickle.dumps(program.checkpoint()))
        course_of_one = course(program, 6)
        end_of_one = plain(program.state)
    with build(driver_of(Growing()), state(), global_batch=7, shares=(5, 2)) as other:
        course(other, 2)
        other.restore(kept)
        assert other.steps == 5
        assert course(other, 6) == course_of_one
        assert jax.tree.all(jax.tree.map(np.array_equal, plain(other.state), end_of_one))


def test_a_checkpoint_is_plain_and_is_left_alone():
    with build(driver_of(Growing()), state()) as program:
        course(program, 2)
        kept = program.checkpoint()
        leaves = jax.tree.leaves(kept)
        assert all(isinstance(leaf, np.ndarray | np.generic | int | float) for leaf in leaves)
        copy = pickle.loads(pickle.dumps(kept))
        program.restore(kept)
        program.step()
        assert jax.tree.all(jax.tree.map(np.array_equal, kept, copy))
        for leaf in leaves:
            if isinstance(leaf, np.ndarray) and leaf.ndim:
                leaf[...] = 0
        program.restore(copy)
        assert np.array_equal(plain(program.state)["w"], copy["state"]["w"])


def test_taking_a_checkpoint_changes_nothing():
    courses = []
    for taken in (False, True):
        with build(driver_of(Growing()), state()) as program:
            first = course(program, 4)
            if taken:
                program.checkpoint()
            courses.append(first + course(program, 4))
    assert courses[0] == courses[1]


def test_a_policy_is_not_shown_steps_of_before_the_checkpoint_twice():
    handler = Growing()
    with build(driver_of(handler), state()) as program:
        course(program, 4)
        kept = program.checkpoint()
        course(program, 1)
        program.restore(kept)
        handler.seen.clear()
        course(program, 2)
    assert [o.step for o in handler.seen] == [5, 6]


def test_shares_hold_on_behind_a_checkpoint():
    sizes = []
    for restored in (False, True):
        with build(driver_of(Recorder()), state(), workers=3, global_batch=10) as program:
            program.warm_up()
            program.step()
            if restored:
                program.restore(program.checkpoint())
            program.rescale(global_batch=21)
            sizes.append(program.batch_sizes)
    assert sizes[0] == sizes[1] == (7, 7, 7)


def test_another_number_of_workers_may_go_on():
    with build(driver_of(Recorder()), state()) as program:
        course(program, 3)
        kept = program.checkpoint()
        reference, end = course(program, 2), plain(program.state)
    with build(driver_of(Recorder()), state(), workers=3) as other:
        other.restore(kept)
        assert other.global_batch == 5
        assert max(other.batch_sizes) - min(other.batch_sizes) <= 1
        found = course(other, 2)
    np.testing.assert_allclose([r[4] for r in found], [r[4] for r in reference], rtol=1e-5)
    np.testing.assert_allclose(plain(other.state)["w"], end["w"], rtol=1e-5)


def local(state, batch):
    smooth = mon.ema(read(PLACE))
    own = state["own"] + read(PLACE)
    return {"own": own, "all": comm.all_reduce(own, op="sum")}, {
        "smooth": comm.all_gather(smooth),
        "y": comm.all_reduce(batch["y"].mean()),
    }


def test_what_is_local_is_kept_for_each_worker():
    options = {"per_worker_state": lambda s: s["own"]}
    start = {"own": 0.0, "all": 0.0}
    with build(local, start, workers=3, **options) as program:
        program.step()
        program.step()
        kept = program.checkpoint()
    assert kept["state"]["own"].tolist() == [2, 4, 6]
    with build(local, start, workers=3, **options) as other:
        other.restore(kept)
        report = other.step()
        assert [float(leaves[-1]) for leaves in other._parts.engine.states] == [3, 6, 9]
        np.testing.assert_allclose(report.metrics["smooth"], [1, 2, 3], rtol=1e-6)
    with (
        build(local, start, workers=2, **options) as fewer,
        pytest.raises(ad.CheckpointError, match="local state of 3 workers; this world has 2"),
    ):
        fewer.restore(kept)


@pytest.mark.parametrize(
    ("members", "workers", "own"),
    [
        ([0, 1, 2], 2, [2, 4]),
        ([0, 1, 2], 5, [2, 4, 6, 0, 0]),
        ([0, 2], 2, [2, 6]),  # worker 1 had left: worker 2 goes on in its slot
        ([1, 2], 4, [0, 4, 6, 0]),
    ],
)
def test_on_another_number_of_workers_who_is_missing_counts_as_lost_and_who_is_further_as_joining(
    members, workers, own
):
    options = {"per_worker_state": lambda s: s["own"]}
    start = {"own": 0.0, "all": 0.0}
    with build(local, start, workers=3, **options) as program:
        program.step()
        program.step()
        kept = {**program.checkpoint(), "members": members}
    with build(local, start, workers=workers, **options) as other:
        other.restore(kept, other_workers_ok=True)
        assert [float(leaves[-1]) for leaves in other._parts.engine.states] == own
        report = other.step()
        assert float(other.state["all"]) == sum(x + i + 1 for i, x in enumerate(own))
        for i, (x, smooth) in enumerate(zip(own, report.metrics["smooth"], strict=True)):
            before, now = x / 2 or i + 1, i + 1  # an operator state goes with its worker
            assert min(before, now) <= smooth <= max(before, now)
            assert (smooth == now) == (before == now)


def counting(label, shape=()):
    def driver(state, batch):
        operators.operator_state(label, np.zeros(shape), lambda n: (n + 1, None))
        return jax.tree.map(lambda s: s + comm.all_reduce(batch["y"].mean()), state), {}

    return driver


@pytest.mark.parametrize(
    ("driver", "start", "wrong"),
    [
        (counting("count"), {"a": 0.0}, r"no state\['a'\], and it has state\[0\], state\[1\] besides"),
        (counting("other"), [0.0, 0.0], r"no slots\['other/0'\]\[0\], and it has slots\['count/0'\]\[0\] besides"),
        (counting("count"), [0.0], r"of another program: it has state\[1\] besides"),
        (counting("count"), [0.0, np.zeros(2, np.float32)], r"state\[1\] has shape \(\) for one of shape \(2,\)"),
        (counting("count", (2,)), [0.0, 0.0], r"shape \(\) for one of shape \(2,\)"),
    ],
    ids=["names", "slots", "leaves", "shapes", "shapes of slots"],
)
def test_a_checkpoint_of_another_driver_is_refused_and_changes_nothing(driver, start, wrong):
    with build(counting("count"), [5.0, 6.0]) as program:
        program.step()
        kept = program.checkpoint()
    with build(driver, start) as other:
        with pytest.raises(ad.CheckpointError, match=wrong):
            other.restore(kept)
        assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, jnp.asarray(b)), other.state, start))
        assert (other.steps, other._parts.stream.consumed) == (0, 0)


# --- through libraries that keep names, and nothing else of the containers --------------------------------------------


class Averaged(NamedTuple):
    """Sorted by name, the average comes first."""

    params: Any
    ema: Any


def averaging(state, batch):
    params = state.params - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state.params, batch))
    return Averaged(params, 0.5 * (state.ema + params)), {"loss": comm.all_reduce(mean_loss(params, batch))}


def test_leaves_are_found_by_their_names_and_not_by_their_order():
    with build(averaging, Averaged(W, 0 * W)) as program:
        course(program, 2)
        kept, state = stored(program.checkpoint()), program.state
        expected = course(program, 2)
    assert list(kept["state"]) == ["ema", "params"]
    with build(averaging, Averaged(W, 0 * W)) as other:
        other.restore(kept)
        assert jax.tree.all(jax.tree.map(np.array_equal, other.state, state))
        assert course(other, 2) == expected


@pytest.mark.parametrize("through", [stored, lambda kept: jax.tree.map(np.asarray, kept)], ids=["names", "arrays"])
def test_all_of_a_program_comes_back_by_name(through):
    with build(driver_of(Growing()), state()) as program:
        course(program, 5)
        kept = through(program.checkpoint())
        expected, end = course(program, 6), plain(program.state)
    with build(driver_of(Growing()), state(), global_batch=7, shares=(5, 2)) as other:
        other.restore(kept)
        assert course(other, 6) == expected
        assert jax.tree.all(jax.tree.map(np.array_equal, plain(other.state), end))
        ((hook_state,),) = [other._parts.hooks.states]
        assert type(hook_state["steps"]) is int
        assert isinstance(hook_state["on device"], jax.Array)


def test_what_is_local_comes_back_by_name():
    options = {"per_worker_state": lambda s: s["own"], "workers": 3}
    with build(local, {"own": 0.0, "all": 0.0}, **options) as program:
        program.step()
        kept = stored(program.checkpoint())
    with build(local, {"own": 0.0, "all": 0.0}, **options) as other:
        other.restore(kept)
        assert [float(leaves[-1]) for leaves in other._parts.engine.states] == [1, 2, 3]


def test_leaves_that_cannot_be_told_apart_are_not_kept():
    start = OrderedDict([(1, 0.0), ("1", 1.0)])
    with (
        build(counting("count"), start) as program,
        pytest.raises(ad.CheckpointError, match=r"state\[1\] and state\['1'\]"),
    ):
        program.checkpoint()


class Handles(Recorder):
    """A hook that goes through these states."""

    def __init__(self, *states):
        super().__init__()
        self.states = states

    def init(self, n_workers):
        return self.states[0]

    def __call__(self, observation, state):
        return None, self.states[min(observation.step // 3, len(self.states) - 1)]


@pytest.mark.parametrize(
    ("states", "wrong"),
    [
        (({"a": None}, {"a": np.zeros(2)}), r"it has state\['a'\] besides"),
        (((), (1.0,)), r"it has state\[0\] besides"),
        ((np.zeros(2), np.zeros(3)), r"state has shape \(3,\) for one of shape \(2,\)"),
        ((0, 0.5), "state is float64 for int64"),
        (({"a": 1.0}, {"b": 1.0}), r"no state\['a'\], and it has state\['b'\] besides"),
    ],
)
def test_a_hook_whose_state_could_not_be_recognised_is_told_so_when_it_is_kept(states, wrong):
    with build(driver_of(Handles(*states)), state()) as program:
        program.checkpoint()
        course(program, 3)
        with pytest.raises(ad.DriverError, match=f"state of hook '0/grow' differs .*{wrong}.*init of grow"):
            program.checkpoint()


def test_each_hook_gets_its_own_state_back_however_many_there_are():
    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        for k in range(12):  # the tenth comes before the second, as text
            operators.hook("one", Handles(np.full(2, k)), (mean,))
        return state + mean, {}

    with build(driver, 0.0) as program:
        program.restore(program.checkpoint())
        assert [int(s[0]) for s in program._parts.hooks.states] == list(range(12))


def test_arrays_of_size_zero_need_no_room():
    empty = {"a": np.zeros((2, 0)), "b": np.arange(2)}
    with build(driver_of(Handles(empty)), state()) as program:
        program.step()
        program.restore(stored(program.checkpoint()))
        (found,) = program._parts.hooks.states
        assert jax.tree.all(jax.tree.map(np.array_equal, found, empty))
        assert found["a"].dtype == float


# --- what is damaged, or of another program ---------------------------------------------------------------------------


def edited(*path, to):
    """A checkpoint with another value somewhere; with none, for `to=None`."""

    def edit(kept):
        *way, last = path
        place = kept
        for part in way:
            place = place[part]
        if to is None:
            del place[last]
        else:
            place[last] = to(place[last]) if callable(to) else to

    return edit


DAMAGED = {
    "no step": (edited("step", to=None), "has no 'step'"),
    "no hooks": (edited("hooks", to=None), "has no 'hooks'"),
    "no seed": (edited("seed", to=None), "has no 'seed'"),
    "another version": (edited("version", to=7), "of version 7; this library reads version 1"),
    "a negative step": (edited("step", to=-1), "step cannot be -1"),
    "half a step": (edited("step", to=2.5), "step is not a whole number: 2.5"),
    "a step that no driver reads": (edited("step", to=2**31), "step cannot be 2147483648"),
    "a negative cursor": (edited("cursor", to=np.int64(-4)), "cursor cannot be -4"),
    "a cursor that is text": (edited("cursor", to="12"), "cursor is not a whole number: '12'"),
    "a cursor for each worker": (edited("cursor", to=[1, 2]), "made on 2 shards"),
    "another seed": (edited("seed", to=3), r"made with seed=3; this program has seed=0.*seed=3\)"),
    "other data": (
        edited("examples", to=[25]),
        "made on 25 examples; this program has 24.*build a program with its state",
    ),
    "NaN shares": (edited("shares", 0, to=float("nan")), "shares must be finite"),
    "negative shares": (edited("shares", 0, to=-1.0), "not negative"),
    "no shares": (edited("shares", to=[0.0, 0.0]), "shares are all zero"),
    "too few shares": (edited("shares", to=[1.0]), "one number per worker, 2"),
    "shares that are none": (edited("shares", to={"a": 1.0}), "shares is not a list of numbers"),
    "an empty batch": (edited("batch_sizes", 0, to=0), "0 examples for worker 0, .* limits are 1 to 9"),
    "a negative batch": (edited("batch_sizes", 0, to=-1), "batch_sizes cannot be -1"),
    "a worker slot that is none": (edited("members", to=[0, 2]), "members cannot be 2"),
    "members that are none": (edited("members", to=[0, 0]), "members are no worker slots"),
    "a batch that does not fit": (edited("batch_sizes", to=[12, 1]), "12 examples for worker 0, .* limits are 1 to 9"),
    "batches beyond the data": (edited("batch_sizes", to=[20, 5]), "larger than the data set"),
    "a complex leaf": (edited("state", "w", to=lambda w: w + 1j), r"state\['w'\] is complex\d+ for float32\.$"),
    "a wider leaf": (edited("state", "w", to=np.float64), r"state\['w'\] is float64 for float32.*astype\('float32'\)"),
    "a leaf that is text": (edited("state", "w", to="x"), r"state\['w'\] has shape \(\) for one of shape \(3,\)"),
    "a leaf of another shape": (edited("state", "w", to=lambda w: w[:2]), r"state\['w'\] has shape \(2,\)"),
    "a missing leaf": (edited("state", "w", to=None), r"it has no state\['w'\]"),
    "half a key": (edited("state", "key", to=lambda k: k[:1]), r"state\['key'\] has shape \(1,\)"),
    "a missing slot": (edited("slots", to={}), r"it has no slots\["),
    "local state": (edited("local", "state", to=[2]), r"state\['w'\] is local, and not in this program"),
    "local slots": (edited("local", "slots", to=[0]), r"slots\['[^']+'\]\[0\] is local, and not in this program"),
    "no word on what is local": (edited("local", to={}), "does not say"),
    "a missing hook": (edited("hooks", "0/grow", to=None), r"it has no hooks\['0/grow'\]"),
    "another hook": (edited("hooks", "1/more", to=1), r"hooks\['1/more'\] besides.*To reset the hooks"),
    "a hook of other workers": (edited("hooks", "0/grow", "losses", to=np.zeros(3)), r"\['losses'\] has shape \(3,\)"),
    "a hook that counts in halves": (edited("hooks", "0/grow", "steps", to=0.5), r"\['steps'\] is float64 for int64"),
}


@pytest.fixture(scope="module")
def kept():
    with build(driver_of(Growing()), state()) as program:
        course(program, 4)
        yield pickle.dumps(program.checkpoint())


@pytest.fixture(scope="module")
def standing():
    """A program that has run some steps of its own."""
    with build(driver_of(Growing()), state(), max_local_batch=9) as program:
        course(program, 1)
        yield program


def all_of(program):
    sizes = program._parts.sizes
    kept = (sizes.current, sizes.previous, sizes.target, sizes.shares, sizes.limits)
    return pickle.dumps(
        (plain(program.state), program.steps, program._parts.stream.cursors, kept, program._parts.hooks.states)
    )


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_refused_by_name_and_changes_nothing(name, kept, standing):
    edit, wrong = DAMAGED[name]
    damaged, before = pickle.loads(kept), all_of(standing)
    edit(damaged)
    with pytest.raises(ad.CheckpointError, match=f"(?s){wrong}"):
        standing.restore(damaged)
    assert all_of(standing) == before


@pytest.mark.parametrize("what", [None, [], 3, b"run"])
def test_what_is_no_checkpoint_is_refused(what, standing):
    with pytest.raises(ad.CheckpointError, match=r"restore takes what program\.checkpoint"):
        standing.restore(what)


def test_nothing_is_replaced_where_a_size_cannot_be_compiled():
    def driver(state, batch):
        if len(batch["y"]) == 7:
            raise MemoryError("no room for 7")
        return state + comm.all_reduce(batch["y"].mean()), {}

    options = {
        "global_batch": 4,
        "world": LocalWorld(),
        "per_worker_state": lambda s: s,
        "resizable": False,
    }  # of 7 in one call
    with ad.Program(driver, 0.0, make_data(24), **options) as program:
        program.step()
        kept = program.checkpoint()
        kept["batch_sizes"] = [7]
        program.step()
        before = all_of(program)
        with pytest.raises(MemoryError):
            program.restore(kept)
        assert all_of(program) == before


def test_what_was_replicated_is_not_taken_for_what_is_local():
    """Of the same shape: a value for each worker, and one value with as many elements."""

    def driver(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), {}

    with build(driver, np.zeros(3, np.float32), workers=3) as program:
        kept = program.checkpoint()
    with (
        build(driver, np.float32(0), workers=3, per_worker_state=lambda s: s) as other,
        pytest.raises(ad.CheckpointError, match="state is not local, and it is in this program"),
    ):
        other.restore(kept)


def test_on_another_number_of_workers_hooks_begin_anew(kept):
    handler = Growing()
    with build(driver_of(handler), state(), workers=3) as program:
        course(program, 2)
        program.restore(pickle.loads(kept))
        (begun,) = program._parts.hooks.states
    assert begun["steps"] == 0
    assert begun["losses"].tolist() == [0, 0, 0]
