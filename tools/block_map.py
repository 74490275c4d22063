"""Record which tests execute each block of the packages, and what each test costs; find the tests of a line.

A block is the body of a function, a loop, a branch, or what follows a statement that may leave the function. `record`
runs the tests in a copy of the work tree, whose bytecode writes down each block by `tools/block_hits.py`; the sources
stay as they are. Processes that a test starts are recorded under the test's name. `BlockMap` reads the records.
It finds a function by its name, so lines may have moved since; where the function itself has changed, the tests of all
its blocks are taken. Tests that failed are kept: some may pass where nothing is recorded.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import _bootstrap_external  # type: ignore[attr-defined]
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import of
from tools import block_hits

IGNORED = ("tests/docs", "tests/benchmarks", "tests/examples", "tests/test_house.py", "tests/test_language.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_MAY_LEAVE = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match | ast.Assert


# --- blocks -----------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A block: its function's name in the file, its number in the function, and its first and last line.

    Block 0 is the function as a whole, with decorators and arguments. Where blocks hold others, the inner ones count.
    """

    function: str
    number: int
    first: int
    last: int


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the functions of a file with their names, an outer one before those inside it."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, Function | ast.ClassDef):
            name = f"{prefix}.{node.name}" if prefix else node.name
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, name)


def _lists(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a function, without those of functions and classes inside it."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, Function | ast.ClassDef):
                yield from _lists(child)


def _cuts(statements: list[ast.stmt]) -> Iterator[int]:
    """Yield where blocks begin in a list of statements: at its start, and after what may leave the function."""
    yield 0
    for i, statement in enumerate(statements[:-1]):
        if isinstance(statement, _MAY_LEAVE):
            yield i + 1


def _of_function(name: str, node: Function) -> Iterator[tuple[Block, list[ast.stmt], int]]:
    """Yield the blocks of a function, each with the list of statements and the place in it where it begins."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    yield Block(name, 0, first, node.end_lineno or 0), node.body, 0
    number = 0
    for statements in _lists(node):
        cuts = list(_cuts(statements))
        for begin, end in zip(cuts, [*cuts[1:], len(statements)], strict=True):
            number += 1
            last = statements[end - 1].end_lineno or 0
            yield Block(name, number, _first(statements[begin]), last), statements, begin


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def blocks(tree: ast.Module) -> list[Block]:
    """Return the blocks of a file."""
    return [block for name, node in functions(tree) for block, _, _ in _of_function(name, node)]


def with_hits(source: str, first_id: int) -> ast.Module:
    """Return the syntax tree of a file that writes down each block at its start, with ids from `first_id`."""
    tree = ast.parse(source)
    found = [entry for name, node in functions(tree) for entry in _of_function(name, node)]
    places = sorted(enumerate(found, first_id), key=lambda entry: -entry[1][2])  # from each list's end
    for number, (_, statements, begin) in places:
        lookup = ast.parse(f"__hits__[{number}]").body[0]
        for node in ast.walk(lookup):
            ast.copy_location(node, statements[begin])
        statements.insert(begin + (begin == 0 and _is_docstring(statements[0])), lookup)
    head = [node for node in tree.body if _is_docstring(node) or _is_future(node)]
    tree.body[len(head) : len(head)] = ast.parse("from block_hits import hits as __hits__").body
    return ast.fix_missing_locations(tree)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


# --- recording --------------------------------------------------------------------------------------------------------


def files_of(root: Path) -> list[str]:
    """Return the files of the packages, in order."""
    return sorted(p.relative_to(root).as_posix() for package in of.PACKAGES for p in (root / package).rglob("*.py"))


def record(folder: Path, processes: int) -> None:
    """Run all tests but the long ones in `folder / "tree"`, and write the records beside it."""
    tree = folder / "tree"
    first_id = 0
    for file in files_of(tree):
        path = tree / file
        source = path.read_text()
        code = compile(with_hits(source, first_id), str(path), "exec", dont_inherit=True)
        # Bytecode that Python takes without a look at the source.
        data = _bootstrap_external._code_to_hash_pyc(code, importlib.util.source_hash(path.read_bytes()), False)
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(data)
        first_id += len(blocks(ast.parse(source)))
    shutil.copy2(block_hits.__file__, tree)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
        block_hits.FOLDER: str(folder),
        "TESTS_ANY_COST": "1",  # recording costs, too
    }
    command = [sys.executable, "-m", "pytest", "-q", "-ptools.block_map", "-pno:cacheprovider", "-m", "not long"]
    command += ["-n", str(processes), "--dist", "worksteal", *(f"--ignore={path}" for path in IGNORED)]
    subprocess.run(command, cwd=tree, env=environment, check=False)


class _Recorder:
    """A plugin that records each test under its name.

    What sets a fixture up that several tests share belongs to all tests of the file.
    """

    def __init__(self) -> None:
        import block_hits  # type: ignore[import-not-found]  # the copy that the packages call

        self._start = block_hits.start
        self._rows = (Path(os.environ[block_hits.FOLDER]) / f"tests-{os.getpid()}.jsonl").open("a")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._start(item.nodeid)
        before = _seconds()
        try:
            return (yield)
        finally:
            row = {"test": item.nodeid, "seconds": round(_seconds() - before, 3)}
            print(json.dumps(row), file=self._rows, flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[object]:
        shared = fixturedef.scope != "function"
        if shared:
            self._start(_file(request._pyfuncitem.nodeid))
        try:
            return (yield)
        finally:
            if shared:
                self._start(request._pyfuncitem.nodeid)


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests: xdist's workers, or the only one."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Recorder())


# --- reading ----------------------------------------------------------------------------------------------------------


class BlockMap:
    """The tests that execute a line, the nearest and cheapest first.

    Args:
      folder: of the records.
      root: of the work tree whose lines are asked for.
    """

    def __init__(self, folder: Path, root: Path):
        self._tree, self._root = folder / "tree", root
        rows = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        self._seconds = {row["test"]: row["seconds"] for row in rows}
        self._texts: dict[Path, str] = {}  # of test files
        self._ids = {}  # of the first block of each file
        count = 0
        for file in files_of(self._tree):
            self._ids[file] = count
            count += len(blocks(ast.parse((self._tree / file).read_text())))
        self._of_block: list[set[str]] = [set() for _ in range(count)]
        for path in folder.glob("*.hits"):
            test = ""
            for line in path.read_text().splitlines():
                if line.isdigit():
                    self._of_block[int(line)].add(test)
                else:
                    test = line

    def stages(self, file: str, line: int) -> Iterator[list[str]]:
        """Yield tests to run one list after another: some cheap ones that execute the line, and the others.

        What is executed at import counts as executed by all tests of the file. The module's test files (`tests/of.py`)
        go first. Those that are new or have changed go last, as a whole; all of them, if the file has no functions.
        """
        near = of.files_of(file, self._root)
        found = {test for name in self._names(file, line) for test in self._expanded(name)}
        tests = sorted(found, key=lambda test: (_file(test) not in near, self._seconds[test]))
        some = [test for test in tests if self._seconds[test] < 1][:40]
        yield from filter(None, [some, [test for test in tests if test not in set(some)]])
        has_blocks = bool(blocks(ast.parse((self._root / file).read_text())))
        yield from ([tests_of_it] for tests_of_it in near if not has_blocks or not self._is_as_recorded(tests_of_it))

    def _names(self, file: str, line: int) -> set[str]:
        """Return the tests that execute a line, as the file is now."""
        if file not in self._ids:
            return set()
        then, now = (ast.parse((root / file).read_text()) for root in (self._tree, self._root))
        ids: dict[tuple[str, int], list[int]] = {}  # a property's functions have one name
        for i, block in enumerate(blocks(then), self._ids[file]):
            ids.setdefault((block.function, block.number), []).append(i)
        holding = [block for block in blocks(now) if block.first <= line <= block.last]
        if not holding:
            wanted = list(ids)
        else:
            block = min(holding, key=lambda b: (b.last - b.first, -b.number))
            wanted = [key for key in ids if key[0] == block.function]
            if _dump(then, block.function) == _dump(now, block.function):
                wanted = [(block.function, block.number)]
        return set().union(*(self._of_block[i] for key in wanted for i in ids[key]))

    def _expanded(self, name: str) -> list[str]:
        """Return the tests of a name that are still there: all of a file, if the name is a file's."""
        tests = [name] if "::" in name else [test for test in self._seconds if _file(test) == name]
        return [test for test in tests if test in self._seconds and self._is_there(test)]

    def _is_as_recorded(self, file_of_tests: str) -> bool:
        then = self._tree / file_of_tests
        return then.exists() and then.read_text() == (self._root / file_of_tests).read_text()

    def _is_there(self, test: str) -> bool:
        path = self._root / _file(test)
        if path not in self._texts:
            self._texts[path] = path.read_text() if path.exists() else ""
        function = test.partition("[")[0].rpartition("::")[2]
        return f"def {function}(" in self._texts[path]


def _file(test: str) -> str:
    return test.partition("::")[0]


def _dump(tree: ast.AST, function: str) -> list[str]:
    return [ast.dump(node) for name, node in functions(tree) if name == function]
