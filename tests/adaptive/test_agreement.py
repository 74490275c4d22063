"""Processes that differ are told so, in what they were built from and in what they decide."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive._agreement import (
    Ledger,
    check_built_alike,
    digest_of_plan,
    digest_of_tree,
    digests_of_lines,
    judge,
    tail_length,
    versions,
)
from adaptive._decision import Decision
from adaptive._local import LocalWorld

from .drivers import FEATURES, Recorder, mean_loss, planned

W = jnp.zeros(FEATURES)
OWN = range(1)


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

    def share(self, value, about=""):
        mine = json.loads(value)
        return [
            value,
            *(json.dumps({**mine, **{k: v for k, v in o.items() if k in mine}}).encode() for o in self._others),
        ]


PLAN = planned(sgd, W)


def test_equal_processes_are_content():
    check_built_alike(Ranks({}, {}), {"data": "1", "state": "2"}, PLAN)


def test_one_process_has_nobody_to_differ_from():
    check_built_alike(LocalWorld(3), {"data": "1"}, PLAN)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("data", "the whole data set, in the same order"),
        ("state['w']", "comm.broadcast(state)"),
        ("seed", "the same arguments"),
    ],
)
def test_what_differs_is_named_with_the_rank_and_what_to_do(name, advice):
    with pytest.raises(ad.DisagreementError) as error:
        check_built_alike(Ranks({}, {name: "other"}), {"quantum": "4", name: "mine"}, PLAN)
    assert f"{name} is not the same on all ranks: rank 0: mine; rank 1: mine; rank 2: other" in str(error.value)
    assert advice in str(error.value)


@pytest.mark.parametrize(
    "setting",
    [
        "jax_enable_x64",
        "jax_default_matmul_precision",
        "jax_default_prng_impl",
        "jax_threefry_partitionable",
        "jax_numpy_dtype_promotion",
    ],
)
def test_a_setting_of_jax_is_named_before_what_follows_from_it(setting):
    with pytest.raises(ad.DisagreementError) as error:
        check_built_alike(Ranks({setting: "'other'", "state['w']": "2"}), {"state['w']": "1"}, PLAN)
    here = repr(getattr(jax.config, setting))
    assert f"{setting} is not the same on all ranks: rank 0: {here}; rank 1: 'other'" in str(error.value)
    assert "set it on all of them" in str(error.value)


def test_versions_may_differ_but_are_told_where_they_may_be_why():
    old = {"versions": "jax 0.6.0, numpy 2.0.0"}
    check_built_alike(Ranks(old), {"state": "1"}, PLAN)
    for name in ("state['w']", "driver"):
        with pytest.raises(ad.DisagreementError) as error:
            check_built_alike(Ranks({**old, name: "other"}), {"state['w']": "1"}, PLAN)
        said = f"different versions, which may be why: rank 0: {versions()}; rank 1: jax 0.6.0, numpy 2.0.0"
        assert said in str(error.value)
    with pytest.raises(ad.DisagreementError) as error:
        check_built_alike(Ranks({"state['w']": "other"}), {"state['w']": "1"}, PLAN)
    assert "versions" not in str(error.value)


def test_of_many_processes_only_the_odd_ones_are_listed():
    others = [{"data": "x" if rank in (3, 7) else "1"} for rank in range(1, 20)]
    with pytest.raises(ad.DisagreementError, match=r"ranks \[3, 7\] differ"):
        check_built_alike(Ranks(*others), {"data": "1"}, PLAN)


def test_a_driver_that_differs_is_told_by_its_line():
    mine, theirs = digests_of_lines(PLAN), digests_of_lines(planned(faster, W))
    (line,) = [name for name in mine if mine[name] != theirs[name]]
    with pytest.raises(ad.DisagreementError) as error:
        check_built_alike(Ranks({"driver": "other", line: theirs[line]}), {}, PLAN)
    assert line in str(error.value)
    assert "no Python branch on the rank" in str(error.value)


def test_plans_of_one_driver_have_one_digest():
    assert digest_of_plan(planned(sgd, W)) == digest_of_plan(planned(sgd, W))
    watched = [digest_of_plan(planned(watching(Recorder()), W)) for _ in range(2)]
    assert watched[0] == watched[1]  # hooks, handlers and slots of two processes lie at different addresses


def watching(recorder, every=5):
    def driver(state, batch):
        operators.slot("count", np.zeros(()), lambda n: (n + 1, n))
        operators.hook("watch", recorder, (state,), every=every)
        return jax.jit(sgd)(state, batch)

    return driver


TABLES = [np.arange(3.0, dtype=np.float32), np.arange(3.0, dtype=np.float32)[::-1].copy()]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sgd, faster),
        (watching(None), watching(None, every=6)),
        (sgd, lambda s, b: (s + comm.all_reduce(jax.grad(mean_loss)(s, b)), {})),
        (lambda s, b: (s + TABLES[0], {}), lambda s, b: (s + TABLES[1], {})),
        (lambda s, b: (s[:, None][:, 0], {}), lambda s, b: (s[::-1], {})),
        (lambda s, b: (s, {"a": s}), lambda s, b: (s, {"a": s + s})),
    ],
    ids=["number", "hook", "sign", "constant", "order", "metric"],
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


# --- decisions --------------------------------------------------------------------------------------------------------

DECISIONS = [
    Decision(global_batch=8),
    Decision(global_batch=9),
    Decision(shares=(1.0, 2.0)),
    Decision(shares=(2.0, 1.0)),
    Decision(stop=True),
]
entries = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(DECISIONS)), max_size=4)


def ledger_of(entered):
    ledger = Ledger()
    for step, decision in entered:
        ledger.enter(step, ["hook"], decision)
    return ledger


@given(entries, entries)
def test_ledgers_agree_if_and_only_if_their_decisions_do(one, other):
    a, b = ledger_of(one), ledger_of(other)
    assert (a.digest == b.digest) == (one == other)


@given(entries)
def test_a_status_survives_single_precision_and_is_never_zero(entered):
    status = ledger_of(entered).status
    assert float(np.float32(status)) == status > 0


def test_silence_and_notes_leave_the_digest_but_are_remembered():
    ledger = ledger_of([(3, DECISIONS[0])])
    before = ledger.digest
    ledger.enter(4, ["quiet"], None)
    ledger.enter(5, ["quiet"], Decision(notes=("seen",)))
    assert ledger.digest == before
    assert ledger.step == 5
    assert "hook 'quiet' asked for nothing" in ledger.last


@pytest.mark.parametrize(
    ("names", "decision", "said"),
    [
        (
            ["grow", "stop"],
            Decision(global_batch=64, stop=True),
            "hook 'grow', 'stop' asked for rescale(global_batch=64)",
        ),
        ([], Decision(shares=(1.0, 3.0)), "program.rescale asked for rescale(shares=(1.0, 3.0))"),
    ],
)
def test_a_ledger_says_who_asked_for_what(names, decision, said):
    ledger = Ledger()
    ledger.enter(7, names, decision)
    assert said in ledger.last


def test_all_is_well_if_all_statuses_are_ones_own():
    ledger = ledger_of([(1, DECISIONS[0])])
    judge(np.full(3, ledger.status), ledger, own=OWN)


def test_a_worker_that_decided_otherwise_is_named_with_what_was_decided_here():
    ledger = Ledger()
    ledger.enter(4, ["grow"], Decision(global_batch=64))
    theirs = ledger_of([(4, Decision(global_batch=65))])
    with pytest.raises(ad.DisagreementError) as error:
        judge(np.array([ledger.status, theirs.status]), ledger, own=range(1))
    text = str(error.value)
    assert "behind step 4: worker 1 did not do what this process (worker 0) did" in text
    assert "hook 'grow' asked for rescale(global_batch=64)" in text
    assert "no rank, clock, random number or file" in text


def test_a_tail_has_a_place_for_every_worker_and_three_more():
    assert tail_length(5) == 8


def test_lines_are_those_of_the_driver():
    assert any("test_agreement.py" in name for name in digests_of_lines(PLAN))
