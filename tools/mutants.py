"""Measure how well the tests protect: change the code at random places, run the tests that reach each, list survivors.

    make mutants                                    # 100 mutants of seed 0
    make mutants ARGS="--count 20 --seed 7 --only 'adaptive/graph/*'"

Cosmic Ray's operators change one place of one file: a comparison, a condition, a number, an exception, a decorator.
Each file is as likely as it is long, each place in it as any other, and so is each change there. Changes of annotations
and of `strict=` are not counted. A mutant runs in a copy of the work tree until a test fails or `--seconds` are spent:
the tests that mirror its module, those that import it, some that run whole programs, and those on ranks where only
ranks reach it. A survivor has survived these tests, not all there are.

Results are appended to `--out` (JSON lines) as they come, and mutants that are there already are not run again.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("adaptive", "collectives", "monitors", "controllers", "launchers")
OPERATORS = {name: OperatorProvider()[name]() for name in OperatorProvider() if not name.startswith("Variable")}

# Tests of several modules together, by the files that they are run for: the first patterns that match. Those of the
# second line start ranks, and are run where the others do not reach.
TOGETHER = {
    "adaptive/data/*": ["tests/sources/test_catalogue.py", "tests/**/test_input_*.py", "tests/adaptive/data/test_*.py"],
    "adaptive/disk/*": ["tests/**/test_checkpoint*.py", "tests/adaptive/disk/test_*.py"],
    "adaptive/observe/*": ["tests/**/test_log*.py", "tests/adaptive/observe/test_*.py"],
    "adaptive/html_report/*": ["tests/adaptive/html_report/test_*.py"],
    "adaptive/check/*": ["tests/**/test_check.py", "tests/fooling/test_*.py", "tests/adaptive/check/test_*.py"],
    "adaptive/*": [
        *("tests/**/test_strategies.py", "tests/**/test_bad_input.py", "tests/**/test_who_takes_part.py"),
        *("tests/**/test_program.py", "tests/**/test_engine.py", "tests/**/test_rescale_workers.py"),
        *("tests/**/test_members.py", "tests/**/test_not_finite.py", "tests/**/test_checkpoint.py"),
    ],
    "collectives/worlds/*": ["tests/collectives/**/test_*.py"],
    "collectives/*": ["tests/collectives/**/test_*.py", "tests/**/test_strategies.py", "tests/**/test_aggregation.py"],
    "monitors/*": ["tests/monitors/**/test_*.py"],
    "controllers/*": ["tests/controllers/**/test_*.py"],
    "launchers/*": ["tests/launchers/**/test_*.py"],
}
ON_RANKS = {
    "collectives/worlds/*jax*": ["tests/**/test_jax_world.py"],
    "collectives/worlds/*": [
        "tests/**/test_mpi.py",
        "tests/mpi/test_programs_on_ranks.py",
        "tests/mpi/test_endings.py",
    ],
    "launchers/*": ["tests/launchers/**/test_*.py", "tests/**/test_ending.py"],
    "adaptive/program/*": ["tests/mpi/test_programs_on_ranks.py"],
}


class Mutant(NamedTuple):
    """One change of one file: the operator's `occurrence`-th."""

    file: str
    line: int
    operator: str
    occurrence: int


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


# --- which tests ------------------------------------------------------------------------------------------------------


def stages(file: str, root: Path) -> Iterator[list[str]]:
    """Return pytest's arguments: for the tests of one process, and for those on ranks."""
    one_process = list(dict.fromkeys([*_near(file, root), *_of_table(TOGETHER, file, root)]))
    yield ["-m", "not ranks and not long", *one_process]
    if ranks := _of_table(ON_RANKS, file, root):
        yield ["-m", "ranks and not long", *ranks]


def _near(file: str, root: Path) -> Iterator[str]:
    """Test files that mirror a module, then those that import it, short ones first."""
    module = Path(file).with_suffix("")
    name, stem = ".".join(module.parts), module.stem.strip("_")
    pattern = re.compile(
        rf"{re.escape(name)}\b|from {re.escape('.'.join(module.parent.parts))} import .*\b{module.stem}\b"
    )
    tests = [t for t in sorted(root.glob("tests/**/test_*.py")) if "mpi" not in t.parts and t.name != "test_house.py"]
    mirrored = [t for t in tests if t.stem == f"test_{stem}"]
    importing = [t for t in tests if t not in mirrored and pattern.search(t.read_text())]
    importing.sort(key=lambda t: t.stat().st_size)
    yield from (t.relative_to(root).as_posix() for t in [*mirrored, *importing])


def _of_table(table: dict[str, list[str]], file: str, root: Path) -> list[str]:
    globs = next((globs for pattern, globs in table.items() if fnmatch.fnmatch(file, pattern)), [])
    found = (p.relative_to(root).as_posix() for g in globs for p in sorted(root.glob(g)))
    return list(dict.fromkeys(found))


# --- running them -----------------------------------------------------------------------------------------------------


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


def judge(mutant: Mutant, copy: Path, seconds: int) -> tuple[str, str]:
    """Run a mutant's tests. Returns "caught", "survived", "out of time" or "no tests", and the test that has failed."""
    path = copy / mutant.file
    source = path.read_text()
    mutated = mutate_code(source, OPERATORS[mutant.operator], mutant.occurrence)
    assert mutated is not None
    verdict = "no tests", ""
    try:
        _write(path, mutated)
        for arguments in stages(mutant.file, copy):
            # A limit would hold for each rank, too, which runs many tests: a job that it ends looks like a failed test.
            status, output = _pytest(
                arguments, copy, resource.RLIM_INFINITY if "ranks" in arguments[1][:5] else seconds
            )
            if status in (-signal.SIGXCPU, -signal.SIGKILL):
                verdict = "out of time", ""
            elif status not in (0, 5):  # 5: no test was selected
                named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return "caught", named[1] if named else f"status {status}"
            verdict = ("survived", "") if status == 0 else verdict
        return verdict
    finally:
        _write(path, source)


def _write(path: Path, source: str) -> None:
    path.write_text(source)
    # Python compares size and second only: bytecode of the version before could be taken for this one's.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _pytest(arguments: list[str], copy: Path, seconds: int) -> tuple[int, str]:
    """Return pytest's exit status, that of SIGXCPU if it takes more seconds of the processor, and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])}
    environment.setdefault("PYTEST_TIMEOUT", "200")  # of a test
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY)),
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")


# --- the command ------------------------------------------------------------------------------------------------------


def change_of(mutant: Mutant) -> str:
    """Return the changed lines of a mutant, as `- old` and `+ new`."""
    source = (ROOT / mutant.file).read_text()
    mutated = mutate_code(source, OPERATORS[mutant.operator], mutant.occurrence) or source
    old, new = source.splitlines(), mutated.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)) - 1)
    return f"- {old[first].strip()}\n+ {new[first].strip()}"


def main() -> None:
    """Draw mutants, run their tests, print a line for each, and the table of survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="*", help="files to draw from, as a pattern")
    parser.add_argument("--seconds", type=int, default=120, help="of the processor, for the tests of a mutant")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl", help="where results are kept")
    options = parser.parse_args()
    files = sorted(p.relative_to(ROOT).as_posix() for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    mutants = draw([f for f in files if fnmatch.fnmatch(f, options.only)], options.count, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {Mutant(**r["mutant"]): (r["verdict"], r["test"]) for r in kept}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_of_work_tree(Path(folder))
        for mutant in mutants:
            if mutant not in known:
                known[mutant] = verdict, test = judge(mutant, Path(folder), options.seconds)
                with options.out.open("a") as out:
                    print(json.dumps({"mutant": mutant._asdict(), "verdict": verdict, "test": test}), file=out)
                print(f"{verdict:9} {mutant.file}:{mutant.line} {mutant.operator} {test}", flush=True)
    verdicts = Counter(known[mutant][0] for mutant in mutants)
    lost = [mutant for mutant in mutants if known[mutant][0] in ("survived", "out of time", "no tests")]
    for mutant in lost:
        print(f"\n{mutant.file}:{mutant.line} ({mutant.operator}, {known[mutant][0]})\n{change_of(mutant)}")
    print(f"\n{len(mutants)} mutants: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}; "
          f"{1 - len(lost) / max(1, len(mutants)):.0%} caught")  # fmt: skip


if __name__ == "__main__":
    main()
