"""Measure how well the tests protect: change the code at random places, run the tests that reach each, list survivors.

    make mutants                                    # 100 mutants of seed 0
    make mutants ARGS="--count 20 --seed 7 --only 'adaptive/graph/*'"

Cosmic Ray's operators change one place of one file: a comparison, a condition, a number, an exception, a decorator.
Each file is as likely as it is long, each place in it as any other, and so is each change there. Changes of annotations
and of `strict=` are not counted. The tests that execute the changed line run in a copy of the work tree, those of the
module and cheap ones first, until one fails or `--seconds` are spent, of the processor or of waiting.
`tools/block_map.py` finds them: the first run records them in `--map`, which takes as long as the test suite. Later
runs use the records again, also when lines have moved; delete the folder to record anew. With `--near` nothing is
recorded: the test files of the module run (`python -m tests.of`), and what survives them may be caught elsewhere.

Verdicts: "caught"; "survived" all tests of the line; "out of time", with tests left; "no tests" execute the line.
Results are appended to `--out` (JSON lines) as they come, and mutants that are there already are not run again.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import fnmatch
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import of as tests_of  # noqa: E402
from tools.block_map import BlockMap, files_of, record  # noqa: E402
from tools.mutant_judge import OPERATORS, Judge, Judged, Mutant  # noqa: E402


def places(source: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the changes that can be made to a source text, by their place: operators and occurrences."""
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    counts: Counter[str] = Counter()
    for node in ast_nodes(get_ast(source)):
        for name, operator in OPERATORS.items():
            for start, _ in operator.mutation_positions(node):
                found.setdefault(start, []).append((name, counts[name]))
                counts[name] += 1
    return found


def draw(files: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants whose program differs from the original's, each at another place; files weigh by their length."""
    sources = {file: (ROOT / file).read_text() for file in files}
    lengths = [len(source) for source in sources.values()]
    of_file: dict[str, dict[tuple[int, int], list[tuple[str, int]]]] = {}
    rng = random.Random(seed)
    drawn: list[Mutant] = []
    while len(drawn) < count and files:
        (file,) = rng.choices(files, lengths)
        if file not in of_file:
            of_file[file] = places(sources[file])
        if not of_file[file]:
            continue
        start = rng.choice(sorted(of_file[file]))
        operator, occurrence = rng.choice(of_file[file].pop(start))
        mutated = mutate_code(sources[file], OPERATORS[operator], occurrence)
        if mutated is not None and _program(mutated) not in (_program(sources[file]), None):
            drawn.append(Mutant(file, start[0], operator, occurrence))
    return drawn


def _program(source: str) -> str | None:
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


def copy_of_work_tree(folder: Path) -> None:
    """Copy what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def change_of(mutant: Mutant) -> str:
    """Return the changed lines of a mutant, as `- old` and `+ new`."""
    source = (ROOT / mutant.file).read_text()
    mutated = mutate_code(source, OPERATORS[mutant.operator], mutant.occurrence) or source
    old, new = source.splitlines(), mutated.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)) - 1)
    return f"- {old[first].strip()}\n+ {new[first].strip()}"


def own_tests(file: str) -> list[list[str]]:
    """Return the test files of a module: first those that start no jobs on ranks, then those that do."""
    files = tests_of.files_of(file, ROOT)
    jobs = [test for test in files if test.startswith("tests/mpi/")]
    return [tests for tests in ([test for test in files if test not in jobs], jobs) if tests]


_here: Judge  # of a process


def _make_judge(seconds: float) -> None:
    global _here
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy_of_work_tree(folder)
    _here = Judge(folder, seconds)


def _judge(mutant: Mutant, stages: list[list[str]]) -> Judged:
    return _here.judge(mutant, stages)


def main() -> None:
    """Draw mutants, run their tests, print a line for each, and the table of survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="*", help="files to draw from, as a pattern")
    parser.add_argument("--seconds", type=int, default=120, help="for a mutant: of the processor, or of waiting")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl", help="where results are kept")
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "block_map", help="which tests execute what")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--near", action="store_true", help="run the module's own test files, without a map")
    options = parser.parse_args()
    mutants = draw([f for f in files_of(ROOT) if fnmatch.fnmatch(f, options.only)], options.count, options.seed)
    if options.near:  # verdicts by fewer tests, kept apart
        options.out = options.out.with_stem(options.out.stem + "_near")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {Mutant(**r["mutant"]): Judged(r["verdict"], r["test"], r["seconds"]) for r in kept}
    if not options.near and not options.map.exists():
        print("Recording which tests execute each line, once: as long as `make test` ...", flush=True)
        copy_of_work_tree(options.map / "tree")
        record(options.map.resolve(), options.jobs)
    lines = None if options.near else BlockMap(options.map.resolve(), ROOT)
    with ProcessPoolExecutor(
        options.jobs, get_context("spawn"), initializer=_make_judge, initargs=(options.seconds,)
    ) as judges:
        asked = {
            judges.submit(
                _judge, mutant, own_tests(mutant.file) if lines is None else list(lines.stages(*mutant[:2]))
            ): mutant
            for mutant in mutants
            if mutant not in known
        }
        for answer in as_completed(asked):
            mutant = asked[answer]
            known[mutant] = judged = answer.result()
            with options.out.open("a") as out:
                print(json.dumps({"mutant": mutant._asdict()} | judged._asdict()), file=out)
            print(f"{judged.verdict:11} {mutant.file}:{mutant.line} {mutant.operator} {judged.test}", flush=True)
    verdicts = Counter(known[mutant].verdict for mutant in mutants)
    lost = [mutant for mutant in mutants if known[mutant].verdict != "caught"]
    for mutant in lost:
        print(f"\n{mutant.file}:{mutant.line} ({mutant.operator}, {known[mutant].verdict})\n{change_of(mutant)}")
    print(f"\n{len(mutants)} mutants: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}; "
          f"{1 - len(lost) / max(1, len(mutants)):.0%} caught; "
          f"{sum(known[mutant].seconds for mutant in mutants) / 60:.0f} minutes of the processor")  # fmt: skip


if __name__ == "__main__":
    main()
