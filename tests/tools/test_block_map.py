"""`make mutants` finds the tests of a line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.mpirun import ROOT
from tools import block_hits
from tools.block_map import BlockMap, blocks, record

MODULE = '''
"""A module."""

from __future__ import annotations

LIMIT = 3


def clipped(value):
    """Return a value within the limits."""
    if value > LIMIT:
        return LIMIT
    elif value < -LIMIT:
        return -LIMIT
    for _ in ():
        value = None
    return value


class Unused:
    def never(self):
        pass


def in_a_process():
    return 1
'''
TESTS = """
import subprocess
import sys

import pytest

from monitors import limits


@pytest.fixture(scope="module")
def clipped():
    return limits.clipped(-4)


def test_high():
    assert limits.clipped(4) == 3


def test_inside():
    assert limits.clipped(2) == 2


def test_low(clipped):
    assert clipped == -3


def test_low_again(clipped):
    assert clipped < 0


def test_process():
    subprocess.run([sys.executable, "-c", "from monitors import limits; limits.in_a_process()"], check=True)


def test_calls():  # fails where it is recorded, as tests do that count calls
    assert limits.clipped(4) == 4
"""
FILE = "monitors/limits.py"
EVERY = {"high", "inside", "low", "low_again", "process", "calls"}


def line_of(text: str) -> int:
    (found,) = (i for i, line in enumerate(MODULE.splitlines(), 1) if line.strip() == text)
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Records of the tests above, and a work tree that holds the same files."""
    folder, root = tmp_path_factory.mktemp("map"), tmp_path_factory.mktemp("root")
    for tree in (folder / "tree", root):
        for name, text in {FILE: MODULE, "monitors/__init__.py": "", "tests/test_limits.py": TESTS}.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
    for name in ("tools", "tests/of.py"):  # what the recorder itself imports
        (folder / "tree" / name).symlink_to(ROOT / name)
    record(folder, 1)
    return folder, root


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        ("return LIMIT", {"high", "calls"}),
        ("return -LIMIT", EVERY),  # executed by a fixture of the module
        ("def clipped(value):", EVERY),
        ("return value", {"inside"}),
        ("value = None", set()),
        ("return 1", {"process"}),
        ("LIMIT = 3", EVERY),  # at import
    ],
)
def test_the_tests_of_a_line_are_those_that_execute_its_block(recorded, text, tests):
    stages = list(BlockMap(*recorded).stages(FILE, line_of(text)))
    assert {name.partition("::test_")[2] for stage in stages for name in stage} == tests


def test_lines_may_move_and_functions_change(recorded, tmp_path):
    folder, _ = recorded
    for name in ("tests", "monitors"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_limits.py").write_text(TESTS)
    moved = MODULE.replace("LIMIT = 3\n", "LIMIT = 3\nOTHER = 4\n")
    (tmp_path / FILE).write_text(moved)
    (only,) = BlockMap(folder, tmp_path).stages(FILE, line_of("return LIMIT") + 1)
    assert sorted(only) == ["tests/test_limits.py::test_calls", "tests/test_limits.py::test_high"]

    (tmp_path / FILE).write_text(moved.replace("return LIMIT", "return +LIMIT"))
    (every,) = BlockMap(folder, tmp_path).stages(FILE, line_of("return LIMIT") + 1)
    assert len(every) == len(EVERY)


def test_test_files_of_the_module_that_are_new_or_have_changed_follow(recorded):
    folder, root = recorded
    (root / "tests" / "test_new.py").write_text(f'COVERS = ("{FILE}",)\n')
    once = ["tests/test_limits.py::test_inside"]
    assert list(BlockMap(folder, root).stages(FILE, line_of("return value"))) == [once, ["tests/test_new.py"]]
    (folder / "tree" / "tests" / "test_new.py").write_text((root / "tests" / "test_new.py").read_text())
    assert list(BlockMap(folder, root).stages(FILE, line_of("return value"))) == [once]
    (root / "tests" / "test_new.py").write_text(f'COVERS = ("{FILE}",)\n\n\ndef test_of_today():\n    pass\n')
    assert list(BlockMap(folder, root).stages(FILE, line_of("return value"))) == [once, ["tests/test_new.py"]]
    (root / "tests" / "test_new.py").unlink()


def test_each_line_of_a_function_is_in_a_block():
    found = blocks(ast.parse(MODULE))
    assert {block.function for block in found} == {"clipped", "Unused.never", "in_a_process"}
    inner = min((b for b in found if b.first <= line_of("return -LIMIT") <= b.last), key=lambda b: b.last - b.first)
    assert (inner.first, inner.last) == (line_of("return -LIMIT"), line_of("return -LIMIT"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_made_by_fork_writes_for_itself_and_under_the_same_test(tmp_path):
    program = dedent("""
        import os

        import block_hits

        block_hits.start("tests/a.py::test_a")
        block_hits.hits[1]
        block_hits.hits[1]
        child = os.fork()
        block_hits.hits[2 if child else 3]
        if child:
            os.waitpid(child, 0)
            os.close(3)
            block_hits.hits[4]
            block_hits.hits[5]
    """)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools"), block_hits.FOLDER: str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    written = [path.read_text().split() for path in tmp_path.iterdir()]
    assert all(lines[0] == "tests/a.py::test_a" for lines in written)
    assert ["tests/a.py::test_a", "3"] in written
    assert {number for lines in written for number in lines if number.isdigit()} >= {"1", "2", "3", "5"}


def test_a_block_that_is_written_down_already_costs_no_call_of_a_python_function(monkeypatch):
    monkeypatch.delenv(block_hits.FOLDER, raising=False)
    monkeypatch.setattr(block_hits, "hits", type(block_hits.hits)())
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    block_hits.hits[1]
    first, calls = calls, []
    block_hits.hits[1]
    sys.setprofile(None)
    assert "call" in first
    assert "call" not in calls


def test_tests_that_are_gone_are_left_out(recorded, tmp_path):
    folder, _ = recorded
    for name in ("tests", "monitors"):
        (tmp_path / name).mkdir()
    (tmp_path / FILE).write_text(MODULE)
    (tmp_path / "tests" / "test_limits.py").write_text(TESTS.replace("def test_high(", "def test_highest("))
    assert list(BlockMap(folder, tmp_path).stages(FILE, line_of("return LIMIT"))) == [
        ["tests/test_limits.py::test_calls"]
    ]


def test_a_file_without_functions_is_tested_by_its_test_files(recorded):
    folder, root = recorded
    (root / "monitors" / "sizes.py").write_text('"""Sizes."""\n\nMOST = 3\n')
    (root / "tests" / "test_limits.py").write_text(f'COVERS = ("monitors/sizes.py",)\n{TESTS}')
    try:
        assert list(BlockMap(folder, root).stages("monitors/sizes.py", 3)) == [["tests/test_limits.py"]]
    finally:
        (root / "tests" / "test_limits.py").write_text(TESTS)
