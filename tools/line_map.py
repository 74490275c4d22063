"""Record which tests execute each line of the packages, and what each test costs; find the tests of a line.

`record` runs the tests in a copy of the work tree, with this module as a pytest plugin, under coverage. Processes that
a test starts are recorded under the test's name. The records stay in a folder: those of tests (`*.jsonl`), those of
lines (`*.coverage`), and the copy (`tree`), which says what the lines were: `LineMap` follows lines and tests that have
moved since.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import coverage
import pytest

PACKAGES = ("adaptive", "collectives", "controllers", "launchers", "monitors")
IGNORED = ("tests/docs", "tests/benchmarks", "tests/examples", "tests/test_house.py", "tests/test_language.py")
FOLDER, TEST = "LINE_MAP", "LINE_MAP_TEST"  # variables of the environment: the folder; the test that starts a process
_CHILD = (
    f"import os\nif os.environ.get('{TEST}'):\n    from tools import line_map\n    line_map.record_this_process()\n"
)


# --- recording --------------------------------------------------------------------------------------------------------


def record(folder: Path, processes: int) -> None:
    """Run all tests but the long ones in `folder / "tree"`, and write the records beside it."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(_CHILD)
    tree = folder / "tree"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(folder / "site"), os.environ.get("PYTHONPATH", "")]),
        FOLDER: str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.line_map", "-p", "no:cacheprovider", "-m", "not long"]
    command += ["-n", str(processes), "--dist", "worksteal", *(f"--ignore={path}" for path in IGNORED)]
    subprocess.run(command, cwd=tree, env=environment, check=False)


def _coverage(kind: str, context: str | None = None) -> coverage.Coverage:
    folder = Path(os.environ[FOLDER])
    recorded = coverage.Coverage(
        data_file=str(folder / f"{kind}-{os.getpid()}-{time.time_ns()}.coverage"),
        source=[str(folder / "tree" / package) for package in PACKAGES],
        config_file=False,
        messages=False,
        context=context,
    )
    recorded.start()
    return recorded


def record_this_process() -> None:
    """Record the lines of a process that a test has started."""
    import atexit

    recorded = _coverage("process", os.environ[TEST])
    atexit.register(lambda: (recorded.stop(), recorded.save()))


class _Recorder:
    """A plugin that records each test under its name."""

    def __init__(self) -> None:
        self._coverage = _coverage("tests")
        self._rows = (Path(os.environ[FOLDER]) / f"tests-{os.getpid()}.jsonl").open("a")
        self._failed = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        os.environ[TEST] = item.nodeid
        self._failed, before = False, _seconds()
        try:
            return (yield)
        finally:
            row = {"test": item.nodeid, "seconds": round(_seconds() - before, 3), "failed": self._failed}
            print(json.dumps(row), file=self._rows, flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests: xdist's workers, or the only one."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Recorder())


# --- reading ----------------------------------------------------------------------------------------------------------


class LineMap:
    """The tests that execute a line, cheapest first.

    Args:
      folder: of the records.
      root: of the work tree whose lines are asked for.
    """

    def __init__(self, folder: Path, root: Path):
        self._tree, self._root = folder / "tree", root
        rows = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        self._rows = {row["test"]: row for row in rows if not row["failed"]}
        self._records = sorted(folder.glob("*.coverage"))
        self._tests = {p.relative_to(root).as_posix(): p.read_text() for p in sorted(root.glob("tests/**/test_*.py"))}
        self._recorded = {self._now(row["test"]) for row in rows}

    def stages(self, file: str, line: int) -> Iterator[list[str]]:
        """Yield tests to run one list after another: some cheap ones that execute the line, and the others.

        What is executed at import counts as executed by all tests of the function, else of the file. Test files that
        are not recorded follow, if they mirror the module or name what it defines.
        """
        lines = _executed_with((self._root / file).read_text(), line)
        by_line = self._by_line(file)
        names = set().union(*(by_line.get(number, set()) for number in lines or by_line))
        rows = sorted((self._rows[name] for name in names if name in self._rows), key=lambda row: row["seconds"])
        some = [name for row in rows[:30] if row["seconds"] < 1 and (name := self._now(row["test"]))]
        yield from filter(None, [some, [n for row in rows if (n := self._now(row["test"])) and n not in some]])
        for file_of_tests in self.unrecorded(file):
            yield [file_of_tests]

    def unrecorded(self, file: str) -> list[str]:
        """Return the test files without records that mirror a module or name what it defines, the nearest first."""
        names = {n.name for n in ast.parse((self._root / file).read_text()).body if hasattr(n, "name")}
        pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names))) or '(?!)'})\b")
        recorded = {name.partition("::")[0] for name in self._recorded if name}
        near = {}
        for path, text in self._tests.items():
            mirrors = Path(path).stem == f"test_{Path(file).stem.strip('_')}"
            near[path] = mirrors or len(pattern.findall(text)) / len(text)
        return [f for f in sorted(near, key=lambda f: -near[f]) if near[f] and f not in recorded]

    @cache  # noqa: B019 - one instance per run
    def _by_line(self, file: str) -> dict[int, set[str]]:
        """Return the names of the tests that execute each line of a file, as the file is now."""
        then = self._tree / file
        if not then.exists():
            return {}
        found: dict[int, set[str]] = {}
        for path in self._records:
            data = coverage.CoverageData(str(path))
            data.read()
            for number, names in data.contexts_by_lineno(str(then)).items():
                found.setdefault(number, set()).update(names)
        old, new = then.read_text().splitlines(), (self._root / file).read_text().splitlines()
        same = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        moved = {block.a + i + 1: block.b + i + 1 for block in same for i in range(block.size)}
        return {moved[number]: names for number, names in found.items() if number in moved}

    def _now(self, name: str) -> str | None:
        """Return the node id of a test whose file may have moved."""
        file, _, rest = name.partition("::")
        if file in self._tests:
            return name
        function = re.split(
            r"\W", rest.rpartition("::")[2] if "[" not in rest else rest.partition("[")[0].rpartition("::")[2]
        )[0]
        holders = [f for f, text in self._tests.items() if f"def {function}(" in text]
        return f"{holders[0]}::{rest}" if len(holders) == 1 else None


def _executed_with(source: str, line: int) -> list[int]:
    """Return the lines of the statement at `line`; of the function whose head it is in; none at import."""
    inside: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or not _first(node) <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # walked from outside to inside
            inside = list(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
        elif inside:
            body = [_first(n) for n in ast.walk(node) if isinstance(n, ast.stmt) and n is not node]
            head = range(node.lineno, max(min(body, default=(node.end_lineno or 0) + 1), node.lineno + 1))
            inside = list(head) if line in head else inside
    return inside


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
