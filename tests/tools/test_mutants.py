"""`make mutants` judges changes of the code by the tests of the changed line."""

from __future__ import annotations

import shutil

import pytest

from tests.mpirun import ROOT
from tools import mutants
from tools.mutants import Mutant, change_of, judge, program


def test_programs_differ_by_more_than_annotations_docstrings_and_strict():
    source = "def f(a: int) -> int:\n    'A.'\n    return list(zip(a, a, strict=True))\n"
    alike = "def f(a: str):\n    'B.'\n    return list(zip(a, a, strict=False))\n"
    assert program(source) == program(alike) != program(source.replace("list", "tuple"))
    assert program("def f(:") is None


@pytest.mark.parametrize(
    ("test", "verdict"), [("assert ONE == 1", "caught"), ("pass", "survived"), ("assert False", "failing")]
)
def test_a_mutant_is_caught_by_a_test_that_fails(tmp_path, test, verdict):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "module.py").write_text("ONE = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(f"from module import ONE\n\n\ndef test_it():\n    {test}\n")
    mutant = Mutant("module.py", 1, "NumberReplacer", "ONE = 2\n")
    said = judge(mutant, ["tests/test_it.py"], tmp_path, 60)
    assert said[0] == verdict
    assert said[1] == ("" if verdict == "survived" else "tests/test_it.py::test_it")
    assert (tmp_path / "module.py").read_text() == "ONE = 1\n"
    assert judge(mutant, [], tmp_path, 60) == ("no tests", "")


def test_a_change_is_shown_by_its_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text("ZERO = 0\nONE = 1\n")
    assert change_of(Mutant("module.py", 2, "", "ZERO = 0\nONE = 2\n")) == "- ONE = 1\n+ ONE = 2"
