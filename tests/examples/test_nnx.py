"""flax nnx's tutorial becomes a program by changing few lines, and learns as it did."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpirun import ROOT, run
from tests.speed import limit

BEFORE, AFTER = ROOT / "tests" / "examples" / "nnx_on_one_device.py", ROOT / "examples" / "nnx.py"
STEPS = 40


def code(script: Path) -> list[str]:
    """A script's lines, after its docstring."""
    source = script.read_text()
    return source.splitlines()[ast.parse(source).body[0].end_lineno :]


def shortened(script: Path, folder: Path, more: str = "") -> Path:
    """A copy of a script that takes few steps, elsewhere; sizes stay as they are, so there is less to compile."""
    text, found = re.subn(r"(?m)^(train_steps|eval_every) = \d+$", rf"\1 = {STEPS}", script.read_text())
    assert found == 2
    copy = folder / script.name
    copy.write_text(text.replace("world=world)", "world=world, resizable=False)") + more)
    return copy


def check(printed: str) -> None:
    pattern = rf"\[(train|test)\] +step: {STEPS}, accuracy: ([\d.]+), loss: ([\d.]+)"
    found = {name: (float(accuracy), float(loss)) for name, accuracy, loss in re.findall(pattern, printed)}
    assert found.keys() == {"train", "test"}, printed  # once each: one rank evaluates
    assert found["train"][0] > 0.6
    assert found["test"][0] > 0.7
    assert found["test"][1] < 1.5


def test_a_user_changes_few_lines():
    before, after = code(BEFORE), code(AFTER)
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(j - i, n - m) for what, i, j, m, n in blocks if what != "equal")
    assert changed <= 20, f"{changed} of {len(before)}"
    assert 85 <= len(before) <= 100  # the tutorial has 94


@pytest.mark.long
def test_it_learns_where_it_is_copied_to(tmp_path):
    check(alone(shortened(AFTER, tmp_path)))


@pytest.mark.long
@pytest.mark.ranks
def test_it_learns_on_two_ranks(tmp_path):
    check(run([shortened(AFTER, tmp_path)], n=2).stdout)


@pytest.mark.long
def test_its_step_does_not_depend_on_the_split(tmp_path):
    assert "\nsplit-invariant" in alone(shortened(AFTER, tmp_path, "print(program.check())\n"))


@pytest.mark.long
def test_the_tutorial_learns(tmp_path):
    check(alone(shortened(BEFORE, tmp_path)))


def alone(script: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=limit(170))
    assert done.returncode == 0, done.stderr
    return done.stdout
