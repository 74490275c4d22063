"""Processes with different builds raise a DisagreementError that names the difference."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.control.build_agreement import (
    check_same_build,
    digest_of_plan,
    digest_of_tree,
    digests_of_lines,
    versions,
)
from tests.adaptive.drivers import FEATURES, Recorder, mean_loss, planned

W = jnp.zeros(FEATURES)


# --- what a program is built from -------------------------------------------------------------------------------------


def sgd(state, batch, rate=0.1):
    return state - rate * comm.all_reduce(jax.grad(mean_loss)(state, batch)), {}


def faster(state, batch):
    return sgd(state, batch, rate=0.2)


class Ranks:
    """Several processes that were built from different things; this one is rank 0."""

    def __init__(self, *others, processes=None):
        self.processes = processes or 1 + len(others)
        self._others = others

    def all_gather_bytes(self, value, about=""):
        mine = json.loads(value)
        return [
            value,
            *(json.dumps({**mine, **{k: v for k, v in o.items() if k in mine}}).encode() for o in self._others),
        ]


PLAN = planned(sgd, W)


def disagreement(others, digests, processes=()):
    with pytest.raises(ad.DisagreementError) as error:
        check_same_build(Ranks(*processes, others), digests, PLAN)
    return str(error.value)


@pytest.mark.parametrize(("name", "advice"), [("state['w']", "comm.broadcast(state)"), ("seed", "the same arguments")])
def test_a_disagreement_names_the_rank_and_the_remedy(name, advice):
    said = disagreement({name: "other"}, {"quantum": "4", name: "mine"}, [{}])
    assert f"{name} is not the same on all ranks: rank 0: mine; rank 1: mine; rank 2: other" in said
    assert advice in said


def test_a_jax_setting_is_named_before_its_consequences():
    said = disagreement({"jax_enable_x64": "'other'", "state['w']": "2"}, {"state['w']": "1"})
    assert f"jax_enable_x64 is not the same on all ranks: rank 0: {jax.config.jax_enable_x64}; rank 1: 'other'" in said
    assert "set it on all of them" in said


def test_versions_may_differ_and_are_named_if_the_driver_differs():
    old = {"versions": "jax 0.6.0, numpy 2.0.0"}
    check_same_build(Ranks(old), {"state": "1"}, PLAN)
    why = f"different versions, which may be why: rank 0: {versions()}; rank 1: jax 0.6.0, numpy 2.0.0"
    for name in ("state['w']", "driver"):
        assert why in disagreement({**old, name: "other"}, {"state['w']": "1"})
    assert "versions" not in disagreement({"state['w']": "other"}, {"state['w']": "1"})


def test_of_many_processes_only_the_odd_ones_are_listed():
    others = [{"data": "x" if rank in (3, 7) else "1"} for rank in range(1, 20)]
    with pytest.raises(ad.DisagreementError, match=r"ranks \[3, 7\] differ"):
        check_same_build(Ranks(*others), {"data": "1"}, PLAN)


def test_the_first_differing_line_of_the_driver_is_named():
    mine, theirs = digests_of_lines(PLAN), digests_of_lines(planned(faster, W))
    (line,) = [name for name in mine if mine[name] != theirs[name]]
    assert "test_build_agreement.py" in line
    said = disagreement({"driver": "other", line: theirs[line]}, {})
    assert line in said
    assert "no Python branch on the rank" in said


def test_plans_of_one_driver_have_one_digest():
    assert digest_of_plan(planned(sgd, W)) == digest_of_plan(planned(sgd, W))
    watched = [digest_of_plan(planned(watching(Recorder()), W)) for _ in range(2)]
    assert watched[0] == watched[1]  # hooks, handlers and slots of two processes lie at different addresses


def watching(recorder, every=5):
    def driver(state, batch):
        operators.operator_state("count", np.zeros(()), lambda n: (n + 1, n))
        operators.hook("watch", recorder, (state,), every=every)
        return jax.jit(sgd)(state, batch)

    return driver


TABLES = [np.arange(3.0, dtype=np.float32), np.arange(3.0, dtype=np.float32)[::-1].copy()]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sgd, faster),
        (watching(None), watching(None, every=6)),
        (lambda s, b: (s + TABLES[0], {}), lambda s, b: (s + TABLES[1], {})),
        (lambda s, b: (s[:, None][:, 0], {}), lambda s, b: (s[::-1], {})),
        (lambda s, b: (s, {"a": s}), lambda s, b: (s, {"a": s + s})),
    ],
    ids=["number", "hook", "constant", "order", "metric"],
)
def test_plans_that_differ_have_other_digests(one, other):
    digests = [digest_of_plan(planned(driver, W)).split(", ")[1:] for driver in (one, other)]
    assert digests[0] != digests[1]


def test_digests_of_trees_are_of_contents_dtypes_and_shapes():
    base = digest_of_tree({"a": np.zeros((2, 3)), "b": 1})
    assert base == digest_of_tree({"a": np.zeros((2, 3)), "b": 1})
    assert base == digest_of_tree({"a": np.zeros((3, 2)).T, "b": np.int64(1)})
    others = [np.zeros((3, 2)), np.zeros((2, 3), np.float32), np.full((2, 3), -0.0), np.zeros(6)]
    assert base not in {digest_of_tree({"a": a, "b": 1}) for a in others}
    keys = [digest_of_tree(jax.random.key(seed)) for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]
    assert digest_of_tree([np.zeros((0, 2)), jnp.ones(2, jnp.bfloat16), True])
