"""Examples run and learn, in one process and under mpirun; most can be copied out of the repository."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpirun import ROOT, run
from tests.speed import limit

EXAMPLES = ROOT / "examples"
PORTS = ["nnx", "language_model", "batch_norm"]  # test_ports.py runs them
ALONE = ["listing_1", "equinox_mlp", "resume", *PORTS]


def started(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A copy of an example, started where there is nothing else."""
    copy = folder / f"{script}.py"
    copy.write_text((EXAMPLES / copy.name).read_text())
    return in_process(copy, *options)


def in_process(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, env=env, cwd=script.parent, capture_output=True, text=True, timeout=limit(170))


def printed_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(done: subprocess.CompletedProcess[str]) -> float:
    return float(re.search(r"test accuracy +([\d.]+)%", printed_by(done))[1])


@pytest.mark.parametrize("script", ALONE)
def test_they_import_packages_alone(script):
    tree = ast.parse((EXAMPLES / f"{script}.py").read_text())
    names = [
        n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    beside = {path.stem for path in EXAMPLES.glob("*.py")}
    assert not {name for name in names if name.partition(".")[0] in beside}


@pytest.mark.long
def test_training_resumes_at_its_step(tmp_path):
    first = started("resume", tmp_path, "--epochs", "2")
    assert "begins in epoch 0, after step 0, on 1 workers" in first.stdout, first.stderr
    steps = int(re.findall(r"epoch +2 +step +(\d+)", first.stdout)[0])
    second = started("resume", tmp_path, "--epochs", "4")
    assert f"begins in epoch 2, after step {steps}, on 1 workers" in second.stdout, second.stderr
    assert accuracy(second) > 60


@pytest.mark.long
def test_training_that_is_killed_can_be_started_again(tmp_path):
    killed = started("resume", tmp_path, "--kill-after", "40")
    assert killed.returncode == -9
    assert accuracy(started("resume", tmp_path, "--epochs", "6")) > 60


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "options", "least"),
    [
        ("listing_1", ["--epochs", "3"], 85),
        ("equinox_mlp", ["--epochs", "8"], 85),
    ],
)
def test_they_learn(script, options, least, tmp_path):
    assert accuracy(started(script, tmp_path, *options)) > least


# --- under mpirun, too ------------------------------------------------------------------------------------------------

ROUNDS = ["--rounds", "4", "--block", "2", "--local-batch", "16", "--local-steps", "2"]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("clients", [1, 3, None])
def test_clients_of_one_process_and_ranks_learn_a_federated_model(clients):
    script = EXAMPLES / "federated.py"
    if clients is None:
        clients, printed = 2, run([script, *ROUNDS], n=2).stdout
    else:
        printed = printed_by(in_process(script, *ROUNDS, "--clients", str(clients)))
    assert "a local batch is a multiple of 2 examples" in printed
    shards = [int(n) for n in re.search(r"Shards of ([\d +]+) examples", printed)[1].split(" + ")]
    assert (len(shards), sum(shards)) == (clients, 1437)
    rows = re.findall(r"^ +(\d+)((?: +[\d.]+ +[\d.]+%){2}) +([\d +]+)$", printed, re.MULTILINE)
    assert [int(rounds) for rounds, _, _ in rows] == [2, 4]
    for _, _, batches in rows:
        sizes = [int(n) for n in batches.split(" + ")]
        assert (len(sizes), sum(sizes)) == (clients, 16 * clients)
        assert all(size % 2 == 0 for size in sizes)
    accuracies = [float(a) for a in re.findall(r"([\d.]+)%", rows[-1][1])]
    assert min(accuracies) > 15  # of ten classes: they learn
    assert re.search(r"a round +[\d.]+ times as fast with LB-BSP's local batches", printed)


@pytest.mark.long
@pytest.mark.ranks
def test_one_word_picks_a_strategy_and_all_learn_on_ranks():
    def accuracies(printed: str) -> dict[str, float]:
        return {name: float(a) for name, a in re.findall(r"^(\w+) +([\d.]+)% +\d+ +\d+$", printed, re.MULTILINE)}

    script = EXAMPLES / "strategies.py"
    one = accuracies(printed_by(in_process(script, *shlex.split("--workers 2 --epochs 2 --strategy hybrid"))))
    ranks = accuracies(run([script, "--epochs", "6"], n=2).stdout)
    names = ["synchronous", "model_averaging", "pair_averaging", "local_steps", "diloco", "hybrid", "islands"]
    assert (list(one), list(ranks)) == (["hybrid"], names)
    assert min([*one.values(), *ranks.values()]) > 30  # of ten classes


@pytest.mark.long
@pytest.mark.ranks
def test_a_language_model_on_two_workers_that_are_meshes_goes_on_as_one(tmp_path):
    script = tmp_path / "fsdp_language_model.py"
    script.write_text((EXAMPLES / script.name).read_text())
    options = shlex.split("--layers 1 --width 16 --context 16 --global-batch 16 --show-every 10")
    options += ["--checkpoints", str(tmp_path / "run")]
    printed = run([script, *options, "--steps", "50"], n=2).stdout
    assert "a mesh of 4 devices (fsdp=2, tp=2)" in printed
    assert "50" in re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +[\d.]+   \d+ \+ \d+$", printed, re.MULTILINE), printed
    printed = printed_by(in_process(script, *options, "--steps", "10"))
    assert re.search(r"^ +60 +[\d.]+ +[\d.]+ +[\d.]+   16$", printed, re.MULTILINE), printed
    assert "by 'ema'" in printed
