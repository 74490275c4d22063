"""Processes in different operations all notice that they are, and say where each one is."""

from __future__ import annotations

import numpy as np
import pytest

from adaptive import DisagreementError
from collectives.worlds.transport.disagreement import Intent, disagreement_error
from collectives.worlds.transport.operations import NUMBERS, Operation
from tests.collectives.worlds.mpi_of_threads import Job, transport_of

LAST = 2**32 - 1


@pytest.mark.parametrize(
    "numbers",
    [(5, 5, 5), (LAST, LAST, LAST), (0, 0, 1), (4, 5, 6), (1 << 16, 2 << 16, 3 << 16), (1, 1 << 16, 0), (LAST, 0, 0)],
)
def test_all_see_whether_all_announce_the_same_number(numbers):
    """Also where the mean of the numbers is one of them. The rest of the preamble changes nothing of it."""

    def use(comm):
        transport, operation = transport_of(comm), Operation("", "", numbers[comm.rank])
        assert operation.numbers.nbytes == 8 * NUMBERS
        operation.room[:] = np.nan
        try:
            transport.run(operation)
        except DisagreementError:
            return False
        return True

    assert Job(3).run(use) == [len(set(numbers)) == 1] * 3


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
