"""Which test files are of a module: the one at its mirrored place, and those that declare in `COVERS` to test it.

    python -m tests.of adaptive/data/rows.py
    make test TESTS="$(python -m tests.of adaptive/data/rows.py)"

The mirrored place of `adaptive/data/rows.py` is `tests/adaptive/data/test_rows.py`; a leading underscore of a module is
left out. A test file of behavior over several modules has a constant of their paths below its imports:

    COVERS = ("adaptive/data/rows.py", "adaptive/data/advice.py")
"""

from __future__ import annotations

import ast
import difflib
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("adaptive", "collectives", "controllers", "launchers", "monitors")

# Tests of something else than the packages' modules, by the beginning of their path, with what they test.
CROSS_CUTTING = {
    "tests/benchmarks/": "what the scripts in benchmarks/ share",
    "tests/contract/": "what the library promises, through its public names alone",
    "tests/docs/": "the pages of the documentation",
    "tests/examples/": "the scripts in examples/",
    "tests/test_constraints.py": "constraints.txt and pyproject.toml",
    "tests/test_house.py": "the source text of all modules",
    "tests/test_language.py": "tests/language.py, and the language of all modules",
    "tests/test_of.py": "tests/of.py, and the places of all tests",
    "tests/test_ranks.py": "tests/ranks.py",
    "tests/test_slurm_requeue.py": "the batch file for Slurm",
    "tests/test_speed.py": "tests/speed.py and tests/cost.py",
    "tests/test_wheel.py": "what a wheel contains",
    "tests/tools/": "the scripts in tools/",
}


def modules(root: Path = ROOT) -> list[str]:
    """Return the paths of the modules that need tests. `__init__` only re-exports, and `__main__` calls a command."""
    files = (p for name in PACKAGES for p in sorted((root / name).rglob("*.py")))
    return [p.relative_to(root).as_posix() for p in files if p.name not in ("__init__.py", "__main__.py")]


def all_files(root: Path = ROOT) -> list[str]:
    """Return the paths of all test files."""
    return [p.relative_to(root).as_posix() for p in sorted((root / "tests").rglob("test_*.py"))]


def mirrored(module: str) -> str:
    """Return the path at which the tests of a module are, if it has a test file of its own."""
    path = Path(module)
    return (Path("tests") / path.parent / f"test_{path.stem.strip('_')}.py").as_posix()


def covers(test: str, root: Path = ROOT) -> tuple[str, ...]:
    """Return the modules that a test file declares to test, without importing it.

    Raises:
      ValueError: if `COVERS` is not a tuple of strings.
    """
    text = (root / test).read_text()
    return _covers(test, text) if "COVERS" in text else ()  # parsing all files takes seconds


@cache
def _covers(test: str, text: str) -> tuple[str, ...]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COVERS":
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                value = None
            if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value):
                raise ValueError(f"{test}:{node.lineno}: COVERS must be a tuple of paths, written out")
            return value
    return ()


def files_of(module: str, root: Path = ROOT) -> list[str]:
    """Return the test files of a module: the mirrored one first, if it exists, then those that cover it."""
    own = mirrored(module)
    covering = [test for test in all_files(root) if test != own and module in covers(test, root)]
    return [own] * (root / own).exists() + covering


def complaints(root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Return modules without tests, and test files that are of no module or cover what does not exist."""
    known = modules(root)
    places = {mirrored(module) for module in known}
    covered = {test: covers(test, root) for test in all_files(root)}
    found = {*covered, *(module for entries in covered.values() for module in entries)}
    without = [
        f"{module}: there is no {mirrored(module)}, and no test file has it in its COVERS"
        for module in known
        if not {module, mirrored(module)} & found
    ]
    wrong = []
    for test, entries in covered.items():
        wrong += [f"{test}: COVERS has {entry}, which is no module" for entry in entries if entry not in known]
        wrong += [f"{test}: is at {entry}'s place already" for entry in entries if mirrored(entry) == test]
        if test not in places and not entries and not test.startswith(tuple(CROSS_CUTTING)):
            wrong.append(f"{test}: there is no module of this name in that place, and COVERS has none")
    return without, wrong


def main(arguments: list[str]) -> None:
    """Print the test files of each module that is named, by its path or dotted name."""
    known = modules()
    for argument in arguments:
        path = Path(argument)
        module = path.resolve().relative_to(ROOT).as_posix() if path.exists() else argument.replace(".", "/") + ".py"
        if module not in known:
            close = difflib.get_close_matches(module, known, 3)
            raise SystemExit(
                f"{argument}: no module of the packages" + ". Did you mean " * bool(close) + ", ".join(close)
            )
        print(*files_of(module), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
