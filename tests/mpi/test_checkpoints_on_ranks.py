"""Checkpoints on disk under mpirun: of several ranks, and from one number of ranks to another."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.mpirun import run

from .test_programs_on_ranks import run_suite

COVERS = ("adaptive/program/checkpoint.py", "adaptive/program/restore.py")

pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent


@pytest.mark.parametrize(("ranks", "kind"), [(2, "mpi"), pytest.param(3, "mpi-two-devices", marks=pytest.mark.long)])
def test_on_ranks(ranks, kind):
    run_suite(kind, ranks, HERE / "checkpoints_on_ranks.py")


def job(directory: Path, ranks: int, steps: int, script: str = "checkpointing.py") -> dict:
    printed = run([HERE / script, directory, str(steps)], n=ranks).stdout
    return json.loads(printed.strip().splitlines()[-1])


@pytest.mark.long
def test_from_two_ranks_to_three_to_one(tmp_path):
    """The same mathematics as without an interruption: the same examples, and the same state up to rounding."""
    jobs = [job(tmp_path / "run", ranks, steps) for ranks, steps in ((2, 5), (3, 9), (1, 12))]
    whole = job(tmp_path / "another", 2, 12)
    assert [(j["workers"], j["began"]) for j in jobs] == [(2, 0), (3, 5), (1, 9)]
    assert jobs[-1]["examples"] == whole["examples"] == 12 * 12
    np.testing.assert_allclose(np.concatenate([j["losses"] for j in jobs]), whole["losses"], rtol=1e-5)
    close = jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6), jobs[-1]["state"], whole["state"])
    assert jax.tree.all(close)


def test_per_worker_state_goes_to_another_number_of_ranks(tmp_path):
    """Those who are there in both jobs go on with their own; one that is new begins anew."""
    three, two, four = (job(tmp_path, ranks, steps, "other_workers.py") for ranks, steps in ((3, 4), (2, 6), (4, 8)))
    assert (three["began"], two["began"], four["began"]) == (0, 4, 6)
    assert not three["refused"]
    assert "other_workers_ok=True" in two["refused"]
    assert "other_workers_ok=True" in four["refused"]
    assert three["after"] == [4.0, 8.0, 12.0]
    assert (two["before"], two["after"]) == ([4.0, 8.0], [6.0, 12.0])
    assert (four["before"], four["after"]) == ([6.0, 12.0, 0.0, 0.0], [8.0, 16.0, 6.0, 8.0])
    assert four["sum"] == sum(range(96))  # each example once: 8 steps of 12
