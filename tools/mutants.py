"""Measure how well the tests protect: change the code at random places, run the module's tests, list survivors.

    make mutants                                    # 100 mutants of seed 0
    make mutants ARGS="--count 20 --seed 7 --only 'adaptive/graph/*' --suite"

Cosmic Ray's operators change one place of one file: a comparison, a condition, a number, an exception, a decorator.
Each file is as likely as it is long, each place in it as any other, and so is each change there. Changes of annotations
and of `strict=` are not counted. The module's own test file, or the folder of tests beside it, runs in a copy of the
work tree until a test fails or `--seconds` have passed. What survives may be caught elsewhere: with `--suite` the whole
suite runs on it.

Verdicts: "caught"; "survived" these tests; "out of time"; "no tests" of the module; "failing": the test fails without
the change, too.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.language import files  # noqa: E402

SUITE = ("tests", "--ignore=tests/docs", "--ignore=tests/benchmarks", "--ignore=tests/examples")
SUITE_SECONDS = 3600  # for the whole suite
PYTEST = (sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", "-m", "not long")


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    line: int
    operator: str
    source: str  # of the changed file


def draw(files: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants whose program differs from the original's, each at another place; files weigh by their length."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    provider, rng = OperatorProvider(), random.Random(seed)
    operators = {name: provider[name]() for name in provider if not name.startswith("Variable")}
    sources = {file: (ROOT / file).read_text() for file in files}
    places: dict[str, dict[tuple[int, int], list[tuple[str, int]]]] = {}
    drawn: list[Mutant] = []
    while len(drawn) < count and files:
        (file,) = rng.choices(files, [len(source) for source in sources.values()])
        if file not in places:
            places[file], counts = {}, Counter[str]()
            for node in ast_nodes(get_ast(sources[file])):
                for name, operator in operators.items():
                    for start, _ in operator.mutation_positions(node):
                        places[file].setdefault(start, []).append((name, counts[name]))
                        counts[name] += 1
        if not places[file]:
            continue
        start = rng.choice(sorted(places[file]))
        name, occurrence = rng.choice(places[file].pop(start))
        mutated = mutate_code(sources[file], operators[name], occurrence)
        if mutated is not None and program(mutated) not in (program(sources[file]), None):
            drawn.append(Mutant(file, start[0], name, mutated))
    return drawn


def program(source: str) -> str | None:
    """Return the syntax tree as text, without annotations, docstrings and `strict=`; None if this is not Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
        elif isinstance(node, ast.Call):
            node.keywords = [k for k in node.keywords if k.arg != "strict"]
    return ast.dump(tree)


def copy_of_work_tree(folder: Path) -> Path:
    """Copy what git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def near(file: str) -> str:
    """Return the test file of a module, or the folder in which it would be."""
    path = Path("tests", Path(file).parent, f"test_{Path(file).stem.strip('_')}.py")
    while not (ROOT / path).exists():
        path = path.parent
    return path.as_posix()


# --- verdicts ---------------------------------------------------------------------------------------------------------


def judge(mutant: Mutant, tests: Sequence[str], tree: Path, seconds: float) -> tuple[str, str]:
    """Return the verdict on a mutant, and the test that has failed.

    Args:
      tree: a copy of the work tree that nobody else uses meanwhile.
    """
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        code, failed = _run(tree, tuple(tests), seconds)
    finally:
        path.write_text(original)
    if code in _VERDICTS:
        return _VERDICTS[code], ""
    passes = _run_unchanged(tree, (failed,) if failed else tuple(tests), seconds)[0] == 0
    return ("caught" if passes else "failing"), failed


_VERDICTS = {0: "survived", 5: "no tests", None: "out of time"}  # by pytest's exit code


def _run(tree: Path, tests: tuple[str, ...], seconds: float) -> tuple[int | None, str]:
    """Return pytest's exit code, 5 without tests and None if the time is over; and the test that has failed."""
    if not tests:
        return 5, ""
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "TESTS_ANY_COST": "1"}
    command = [*PYTEST, "-x", "-n0", "--tb=no", "-rfE", f"--session-timeout={seconds:.0f}", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environ, text=True, capture_output=True, timeout=2 * seconds)
    except subprocess.TimeoutExpired:
        return None, ""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return (None if "session-timeout" in done.stdout else done.returncode), "".join(failed[:1])


_run_unchanged = cache(_run)


def change_of(mutant: Mutant) -> str:
    """Return the changed lines of a mutant, as `- old` and `+ new`."""
    old, new = (ROOT / mutant.file).read_text().splitlines(), mutant.source.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)) - 1)
    return f"- {old[first].strip()}\n+ {new[first].strip()}"


def main() -> None:
    """Draw mutants, run their tests, print a line for each, and the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="*", help="files to draw from, as a pattern")
    parser.add_argument("--seconds", type=float, default=120, help="for a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--suite", action="store_true", help="run all tests on what survives those of its module")
    args = parser.parse_args()
    drawn_from = [f for f in files() if fnmatch.fnmatch(f, args.only) and not f.endswith("__.py")]
    mutants = draw(drawn_from, args.count, args.seed)
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as copies, ThreadPoolExecutor(args.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            trees.put(copy_of_work_tree(Path(copies, str(number))))

        def judged(mutant: Mutant) -> tuple[Mutant, tuple[str, str]]:
            tree = trees.get()
            try:
                verdict = judge(mutant, [near(mutant.file)], tree, args.seconds)
                if args.suite and verdict[0] in ("survived", "no tests"):
                    verdict = judge(mutant, SUITE, tree, SUITE_SECONDS)
                return mutant, verdict
            finally:
                trees.put(tree)

        for mutant, (verdict, said) in pool.map(judged, mutants):
            verdicts[verdict] += 1
            print(f"{verdict:11} {mutant.file}:{mutant.line} {mutant.operator} {said}", flush=True)
            if verdict != "caught":
                print(change_of(mutant), flush=True)
    print(f"{len(mutants)} mutants: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}")


if __name__ == "__main__":
    main()
