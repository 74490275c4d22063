"""Processes with different decisions raise a DisagreementError."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive as ad
from adaptive.base.decision import Decision
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.requests import hooks_in_words

DECISIONS = [
    Decision(global_batch=8),
    Decision(global_batch=9),
    Decision(shares=(1.0, 2.0)),
    Decision(shares=(2.0, 1.0)),
    Decision(stop=True),
    Decision(workers=8),
    Decision(workers=9),
    Decision(hyperparameters={"rate": 0.1}),
    Decision(hyperparameters={"rate": 0.2}),
    Decision(hyperparameters={"momentum": 0.1}),
]
entries = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(DECISIONS)), max_size=4)


def digest_of(entered):
    digest = DecisionDigest()
    for step, decision in entered:
        digest.enter(step, "hook 'hook'", decision)
    return digest


@given(entries, entries)
def test_digests_are_equal_if_and_only_if_the_decisions_are(one, other):
    a, b = digest_of(one), digest_of(other)
    assert (a.value == b.value) == (one == other)


@given(entries)
def test_a_digest_and_a_request_to_leave_fit_in_single_precision(entered):
    value = digest_of(entered).value
    assert float(np.float32(4 * value + 2)) == 4 * value + 2 > 2


def test_silence_and_notes_leave_the_digest_but_are_remembered():
    digest = digest_of([(3, DECISIONS[0])])
    before = digest.value
    digest.enter(5, "hook 'quiet'", Decision(notes=("seen",)))
    assert (digest.value, digest.step) == (before, 5)
    assert "hook 'quiet' asked for nothing" in digest.last


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (Decision(workers=4, global_batch=64, stop=True), "rescale(workers=4, global_batch=64) and stop()"),
        (Decision(shares=(1.0, 3.0)), "rescale(shares=(1.0, 3.0))"),
        (Decision(hyperparameters={"lr": 0.1}), "set_hyperparameters(lr=0.1)"),
    ],
)
def test_a_digest_contains_requests_and_hooks(decision, said):
    digest = DecisionDigest()
    digest.enter(7, hooks_in_words(["grow", "stop"]), decision)
    assert digest.last == f"hooks 'grow', 'stop' asked for {said}"


def disagreement(*entered):
    digest = DecisionDigest()
    digest.enter(3, "hook 'before'", None)
    digest.compare(np.full(2, float(digest.value)), own=range(1))  # all is well
    for who, decision in entered:
        digest.enter(4, who, decision)
    with pytest.raises(ad.DisagreementError) as error:
        digest.compare(np.array([digest.value, digest.value % 2**24 + 1]), own=range(1))
    return str(error.value)


def test_all_hooks_since_the_last_comparison_are_named():
    rate, quiet = ("program.set_hyperparameters", Decision(hyperparameters={"lr": 0.1})), ("hook 'quiet'", None)
    text = disagreement(quiet, rate)
    assert (
        "Here hook 'quiet' asked for nothing; then program.set_hyperparameters asked for set_hyperparameters(lr=0.1).\n"
        in text
    )
    assert "A hook must decide" in text
    assert "on every process, with the same values" in text
    assert "before" not in text
    assert "after step 4: worker 1 did not do what this process (worker 0) did" in text
    assert "no rank, clock, random number or file" in text


def test_a_request_of_the_script_is_not_attributed_to_hooks():
    text = disagreement(
        ("program.rescale", DECISIONS[0]), ("program.set_hyperparameters", Decision(hyperparameters={"lr": 0.1}))
    )
    assert "program.rescale asked for rescale(global_batch=8); then program.set_hyperparameters asked for set_" in text
    assert "A hook must" not in text
    assert "every process" not in disagreement(("hook 'grow'", DECISIONS[0]))


@pytest.mark.parametrize("shares", [(1.0, 2.0, 3.0), (1.0, 2.0, 3.0 + 1e-15)])
def test_shares_are_compared_to_the_last_bit(shares):
    same = digest_of([(1, Decision(shares=(1.0, 2.0, 3.0)))]).value == digest_of([(1, Decision(shares=shares))]).value
    assert same == (shares == (1.0, 2.0, 3.0))
    assert digest_of([(1, Decision(shares=shares))]).value != digest_of([(1, Decision(stop=True))]).value


def test_hooks_that_decide_differently_are_named_with_their_lines():
    digest = DecisionDigest({"grow": "train.py:9", "stop": "train.py:12"})
    digest.enter(7, hooks_in_words(["grow"]), Decision(workers=4))
    with pytest.raises(ad.DisagreementError, match=r"Look at 'grow' \(train.py:9\)\.$"):
        digest.compare(np.asarray([digest.value, 0]), own=range(1))
