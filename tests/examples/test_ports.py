"""Programs for one device that became programs for any number of workers learn as before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpirun import ROOT, run
from tests.speed import limit

NAMES = ["nnx", "language_model", "batch_norm"]
SHORT = {  # settings of a short run
    "nnx": {"train_steps": 40, "eval_every": 40},
    "language_model": {
        "context, width, heads, layers": (16, 16, 2, 1),
        "batch_size, late_batch_size": (8, 16),
        "max_tokens, late_tokens": (5120, 2560),
        "learning_rate, warmup_tokens": (1e-2, 640),
        "eval_every, show_every": (10, 10),
    },
    "batch_norm": {"epochs, patience": (4, 2), "batch_size, late_batch_size, late_epoch": (64, 192, 2)},
}
OF_PROGRAM = {"nnx": "resizable=False", "language_model": "deterministic=True", "batch_norm": "deterministic=True"}


def shortened(name: str, folder: Path, more: str = "") -> Path:
    """A copy of an example that takes few steps, elsewhere."""
    script = ROOT / "examples" / f"{name}.py"
    text = script.read_text()
    for setting, value in SHORT[name].items():
        text, found = re.subn(rf"(?m)^{setting} = .*$", f"{setting} = {value}", text)
        assert found == 1, setting
    text = text.replace('"runs/', f'"{folder}/runs/')
    copy = folder / script.name
    copy.write_text(text.replace("world=world)", f"world=world, {OF_PROGRAM[name]})") + more)
    return copy


def check(name: str, printed: str) -> None:
    {"nnx": check_nnx, "language_model": check_language_model, "batch_norm": check_batch_norm}[name](printed)


def check_nnx(printed: str) -> None:
    pattern = r"\[(train|test)\] +step: 40, accuracy: ([\d.]+), loss: ([\d.]+)"
    found = {part: (float(accuracy), float(loss)) for part, accuracy, loss in re.findall(pattern, printed)}
    assert found.keys() == {"train", "test"}, printed  # once each: one rank evaluates
    assert found["train"][0] > 0.6
    assert found["test"][0] > 0.7
    assert found["test"][1] < 1.5


def check_language_model(printed: str) -> None:
    rows = re.findall(r"^step (\d+): ([\d,]+) tokens, batch (\d+), loss [\d.]+$", printed, re.MULTILINE)
    assert rows == [("10", "1,280", "8"), ("20", "2,560", "8"), ("30", "5,120", "16")], printed
    losses = [float(loss) for loss in re.findall(r"^step \d+: val loss ([\d.]+)$", printed, re.MULTILINE)]
    best = float(re.search(r"^best val loss ([\d.]+)$", printed, re.MULTILINE)[1])  # type: ignore[index]
    assert len(losses) == 3
    assert best == pytest.approx(min(losses), abs=2e-3)
    assert best < 4  # every character alike: 4.6
    assert len(printed.partition('The "for" statement ')[2]) > 300  # it has written something


def check_batch_norm(printed: str) -> None:
    rows = re.findall(r"^epoch (\d): batch (\d+), loss [\d.]+, accuracy ([\d.]+)%$", printed, re.MULTILINE)
    assert [int(epoch) for epoch, *_ in rows] == [1, 2, 3, 4], printed
    assert [int(batch) for _, batch, _ in rows] == [64, 64, 192, 192]
    best = float(re.search(r"^test accuracy ([\d.]+)%$", printed, re.MULTILINE)[1])  # type: ignore[index]
    assert best == pytest.approx(max(float(accuracy) for *_, accuracy in rows))
    assert best > 90
    wrong = re.findall(r"\d+", printed.partition("wrong: ")[2])
    assert len(wrong) == round((1 - best / 100) * 360)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_port_learns_where_it_is_copied_to(name, tmp_path):
    script = shortened(name, tmp_path)
    printed = alone(script)
    check(name, printed)
    if name == "language_model":  # the same command continues from the last checkpoint, which has all tokens
        best = printed[printed.index("\nbest") :]
        assert alone(script).endswith(best)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_the_port_learns_on_two_ranks(name, tmp_path):
    check(name, run([shortened(name, tmp_path)], n=2).stdout)


@pytest.mark.long
@pytest.mark.parametrize("name", ["nnx", "batch_norm"])
def test_a_step_does_not_depend_on_the_split(name, tmp_path):
    more = "print(program.check())\n" if name == "nnx" else ""
    assert "split-invariant" in alone(shortened(name, tmp_path, more))


def alone(script: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, cwd=script.parent, capture_output=True, text=True, timeout=limit(170))
    assert done.returncode == 0, done.stderr
    return done.stdout
