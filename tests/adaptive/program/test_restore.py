"""A checkpoint that is damaged, or of another program, is refused, and the program is unchanged."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from tests.adaptive.program.resumable import Growing, build, counting, course, driver_of, plain, state


@pytest.mark.parametrize(
    ("driver", "start", "wrong"),
    [
        (counting("count"), {"a": 0.0}, r"it has no state\['a'\], but state\[0\], state\[1\]"),
        (counting("other"), [0.0, 0.0], r"no slots\['other/0'\]\[0\], but slots\['count/0'\]\[0\]"),
        (counting("count"), [0.0], r"of another program: it has state\[1\]\."),
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
        assert (other.steps, other._parts.stream.cursors[0]) == (0, 0)


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
    "no seed": (edited("seed", to=None), "has no 'seed'"),
    "an earlier version": (
        edited("version", to=1),
        "of version 1, not 2.*last commit .* that reads version 1 is 990a7dcc",
    ),
    "a negative step": (edited("step", to=-1), "step must be whole numbers, not negative; got -1"),
    "half a step": (edited("step", to=2.5), r"step must be whole numbers.*got 2\.5"),
    "a cursor that is text": (edited("cursor", to="12"), "cursor must be whole numbers.*got '12'"),
    "another seed": (edited("seed", to=3), r"made with seed=3; this program has seed=0.*seed=3\)"),
    "other data": (
        edited("examples", to=[25]),
        "made on 25 examples; this program has 24.*build a program with its state",
    ),
    "data of unknown lengths": (
        edited("examples", to=[2**31 - 1] * 2),
        r"made on \? \+ \? examples; this program has 24 \(\?: from_iterator without length=\)",
    ),
    "NaN shares": (edited("shares", 0, to=float("nan")), "shares must be finite"),
    "too few shares": (edited("shares", to=[1.0]), "one number per worker, 2"),
    "a worker slot that is none": (edited("members", to=[0, 2]), r"members are not worker slots: \(0, 2\)"),
    "a wider leaf": (edited("state", "w", to=np.float64), r"state\['w'\] is float64 for float32.*astype\('float32'\)"),
    "a leaf that is text": (edited("state", "w", to="x"), r"state\['w'\] holds text"),
    "a leaf of another shape": (edited("state", "w", to=lambda w: w[:2]), r"state\['w'\] has shape \(2,\)"),
    "a missing leaf": (edited("state", "w", to=None), r"it has no state\['w'\]"),
    "half a key": (edited("state", "key", to=lambda k: k[:1]), r"state\['key'\] has shape \(1,\)"),
    "a missing slot": (edited("slots", to={}), r"it has no slots\["),
    "another hook": (edited("hooks", "1/more", to=1), r"it has hooks\['1/more'\].*To reset the hooks"),
    "a hook of other workers": (edited("hooks", "0/grow", "losses", to=np.zeros(3)), r"\['losses'\] has shape \(3,\)"),
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
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_field_and_changes_nothing(name, kept, standing):
    edit, wrong = DAMAGED[name]
    damaged, before = pickle.loads(kept), all_of(standing)
    edit(damaged)
    with pytest.raises(ad.CheckpointError, match=f"(?s){wrong}"):
        standing.restore(damaged)
    assert all_of(standing) == before


@pytest.mark.parametrize("what", [None, 3])
def test_an_object_that_is_no_checkpoint_is_refused(what, standing):
    with pytest.raises(ad.CheckpointError, match=r"restore takes what program\.checkpoint"):
        standing.restore(what)


def test_a_restore_changes_nothing_if_a_kernel_cannot_be_compiled():
    def driver(state, batch):
        if len(batch["y"]) == 7:
            raise MemoryError("no room for 7")
        return state + comm.all_reduce(batch["y"].mean()), {}

    with build(driver, 0.0, 1, global_batch=4, per_worker_state=lambda s: s, resizable=False) as program:
        program.step()
        kept = program.checkpoint()
        kept["batch_sizes"] = [7]
        program.step()
        before = all_of(program)
        with pytest.raises(MemoryError):
            program.restore(kept)
        assert all_of(program) == before


def test_batch_sizes_that_the_workers_cannot_have_here_are_split_anew(kept, standing):
    checkpoint = pickle.loads(kept)
    checkpoint["batch_sizes"], checkpoint["global_batch"] = [12, 1], 13
    standing.restore(checkpoint)
    assert sorted(standing.batch_sizes) == [6, 7]


def test_hooks_start_with_initial_states_on_another_number_of_workers(kept):
    handler = Growing()
    with build(driver_of(handler), state(), workers=3) as program:
        course(program, 2)
        program.restore(pickle.loads(kept))
        (begun,) = program._parts.hooks.states
    assert begun["steps"] == 0
    assert begun["losses"].tolist() == [0, 0, 0]
