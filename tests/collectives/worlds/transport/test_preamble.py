"""Frames: all processes announce the same, or every one of them sees that they do not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives.worlds.transport.disagreement import Intent, disagreement_error
from collectives.worlds.transport.preamble import NUMBERS, Preamble

COVERS = ("collectives/worlds/transport/disagreement.py",)

U32 = st.integers(0, 2**32 - 1)


def verdicts(numbers):
    """What each process makes of the sum of all their frames."""
    frames = [Preamble(len(numbers)) for _ in numbers]
    for frame, number in zip(frames, numbers, strict=True):
        frame.announce(number)
    total = np.sum([frame.numbers for frame in frames], axis=0)
    for frame in frames:
        frame.numbers[:] = total
    return {frame.heard() == frame.expected for frame in frames}


@given(st.lists(st.one_of(st.integers(0, 2), U32), min_size=1, max_size=9))
def test_all_see_whether_all_announce_the_same(numbers):
    assert verdicts(numbers) == {len(set(numbers)) == 1}


@given(U32, st.integers(1, 2**16 - 1))
def test_a_message_between_two_others_is_recognized(number, step):
    around = [(number - step) % 2**32, number, (number + step) % 2**32]
    assert verdicts(around) == {False}


def test_sums_are_exact_for_a_million_processes():
    frame, p = Preamble(2**20), 2**20
    frame.announce(2**32 - 1)
    one = frame.numbers.copy()
    frame.numbers *= p
    assert frame.heard() == frame.expected
    frame.numbers[:] = (p - 1) * one
    frame.announce(2**32 - 2)
    other = frame.numbers.copy()
    frame.numbers[:] = (p - 1) * one + other
    assert frame.heard() != frame.expected


def test_a_message_in_the_preamble_does_not_change_the_announcement():
    frame = Preamble(1)
    frame.announce(7)
    frame.room[:] = np.nan
    assert frame.heard() == frame.expected
    assert frame.numbers.nbytes == 8 * NUMBERS


# --- what is said where they do not -----------------------------------------------------------------------------------


def presence(about, *, text="", more="", line="", failure="", threads=("MainThread",)):
    return Intent(about, text, more, line, failure, False, threads)


def test_each_operation_is_listed_once_with_its_ranks_and_lines():
    step, evaluate = presence("message 1 of step 4", line="train.py:20"), presence("evaluate", line="train.py:31")
    text = str(disagreement_error([step, evaluate, step], own=1))
    assert "    ranks 0, 2: message 1 of step 4 (train.py:20)\n    rank 1: evaluate (train.py:31)\n" in text
    assert "the same order" in text


def test_layouts_are_shown_where_the_words_are_the_same():
    everyone = [presence("x", text="sum float32[2]"), presence("x", text="sum float64[2]")]
    assert "rank 0: x: sum float32[2]\n    rank 1: x: sum float64[2]" in str(disagreement_error(everyone, own=0))
    assert "float32" not in str(disagreement_error([everyone[0], presence("y")], own=0))


def test_of_a_thousand_ranks_a_few_are_shown():
    everyone = [presence(f"evaluate {rank}") for rank in range(1000)]
    assert str(disagreement_error(everyone, own=3)).count("\n") < 12
    assert "and 992 more" in str(disagreement_error(everyone, own=3))


def test_a_failure_takes_precedence():
    failed = presence("", failure="in step 2: OSError: gone")
    text = str(disagreement_error([presence("a barrier", line="train.py:8"), failed, presence("y"), failed], own=0))
    assert text.startswith("ranks 1, 3 failed in step 2: OSError: gone")
    assert "Rank 0 stops too, in a barrier (train.py:8)." in text


def test_the_error_about_threads_that_share_a_world_names_the_remedy():
    everyone = [presence("a", threads=["A", "B"]), presence("b")]
    assert "world=comm.MPIWorld()" in str(disagreement_error(everyone, own=0))
