"""Judge mutants: forks of one process, which has imported the packages, run the tests of the changed line.

A change inside functions is put into the fork's memory. Where an import runs the changed line, the tests run in a new
process, which reads the changed file; so do processes that tests start.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import re
import resource
import signal
import sys
import tempfile
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

from tests.of import PACKAGES

OPERATORS = {name: OperatorProvider()[name]() for name in OperatorProvider() if not name.startswith("Variable")}
ROOT = Path(__file__).resolve().parents[1]
LONGEST = 150  # seconds that a test may take


class Mutant(NamedTuple):
    """One change of one file: the operator's `occurrence`-th."""

    file: str
    line: int
    operator: str
    occurrence: int


class Judged(NamedTuple):
    """What became of a mutant: the verdict, the test that has failed, and the processor seconds spent."""

    verdict: str
    test: str
    seconds: float


class Judge:
    """Runs the tests of mutants in a copy of the work tree.

    Args:
      copy: of the work tree, in which files are changed.
      seconds: of the processor, for a mutant.

    Raises:
      RuntimeError: if an import has started a backend of JAX, whose threads a fork would not have.
    """

    def __init__(self, copy: Path, seconds: float):
        self._copy, self._seconds = copy, seconds
        self._sound: dict[str, bool] = {}  # whether a test passes where nothing is changed
        os.chdir(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path) != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # tests/mpirun.py starts ranks in the tree that it is in
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
        os.environ["TESTS_ANY_COST"] = "1"  # a mutant is not found by being slow
        for file in sorted(f.relative_to(copy) for name in PACKAGES for f in copy.glob(f"{name}/**/*.py")):
            if file.stem != "__main__":
                importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
        if sys.modules["jax._src.xla_bridge"].backends_are_initialized():
            raise RuntimeError("an import has started a backend of JAX, whose threads a fork would not have")

    def judge(self, mutant: Mutant, stages: list[list[str]]) -> Judged:
        """Return what becomes of a mutant whose tests run one list after another."""
        path = self._copy / mutant.file
        source = path.read_text()
        mutated = mutate_code(source, OPERATORS[mutant.operator], mutant.occurrence)
        assert mutated is not None
        codes = changed(source, mutated)
        verdict, spent = "no tests", 0.0
        try:
            for tests in stages:
                while tests:
                    _write(path, mutated)
                    judged = self._run(tests, mutant.file, codes, self._seconds - spent)
                    spent += judged.seconds
                    _write(path, source)
                    if judged.verdict != "caught" or self._is_sound(judged.test):
                        break
                    tests = [*tests, f"--deselect={judged.test}"]
                if judged.verdict in ("caught", "out of time") or spent > self._seconds:
                    verdict = "caught" if judged.verdict == "caught" else "out of time"
                    return Judged(verdict, judged.test, round(spent, 1))
                verdict = "survived" if "survived" in (verdict, judged.verdict) else "no tests"
            return Judged(verdict, "", round(spent, 1))
        finally:
            _write(path, source)

    def _is_sound(self, test: str) -> bool:
        """Return whether a test passes where nothing is changed. What is no test is an import that fails."""
        if "::" in test and test not in self._sound:
            self._sound[test] = self._run([test], "", [], self._seconds).verdict == "survived"
        return self._sound.get(test, True)

    def _run(self, tests: list[str], file: str, codes: list[CodeType] | None, seconds: float) -> Judged:
        """Run tests until one fails: with new code of functions, or in a new process if there is none."""
        limits = [f"--timeout={LONGEST}", f"--session-timeout={max(1, int(seconds))}"]
        arguments = ["-x", "-v", "-s", "--tb=no", "-n0", "-p", "no:cacheprovider", *limits, *tests]
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                status = 70
                try:
                    for number in (1, 2):
                        os.dup2(output.fileno(), number)
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    # Ranks inherit the limit, and each has it for itself: the session's limit ends many tests on ranks.
                    resource.setrlimit(resource.RLIMIT_CPU, (max(1, int(seconds)), resource.RLIM_INFINITY))
                    if codes is None:
                        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
                    put_in(file, codes)
                    status = pytest.main(arguments)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(int(status))
            _, status, usage = os.wait4(child, 0)
            output.seek(0)
            text = output.read().decode(errors="replace")
        code, spent = os.waitstatus_to_exitcode(status), round(usage.ru_utime + usage.ru_stime, 1)
        if code == 4 and (gone := re.findall(r"not found: \S*?(tests/.*?)(?: \(no match.*)?$", text, re.MULTILINE)):
            there = [test for test in tests if test not in gone]
            found = self._run(there, file, codes, seconds) if there else Judged("no tests", "", 0.0)
            return found._replace(seconds=found.seconds + spent)
        if code in (0, 5):  # 5: there are no tests
            return Judged("no tests" if code else "survived", "", spent)
        named = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
        if code == -signal.SIGXCPU or ("sec exceeded" in text and not named):  # the processor's time, or the session's
            return Judged("out of time", "", spent)
        running = re.findall(r"^(tests/\S+::.+?) (?:PASSED|SKIPPED|$)", text, re.MULTILINE)  # as the process ended
        return Judged("caught", (named or running or [f"status {code}: {text[-500:]}"])[-1], spent)


def _write(path: Path, source: str) -> None:
    if path.read_text() != source:
        path.write_text(source)
        # Python compares size and second only: bytecode of the version before could be taken for this one's.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def changed(source: str, mutated: str) -> list[CodeType] | None:
    """Return the code of the functions that a change is in, the outermost first; None if an import runs the change."""
    path: list[CodeType] = []
    old, new = compile(source, "", "exec"), compile(mutated, "", "exec")
    while True:
        codes = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
        if len(codes[0]) != len(codes[1]) or _of_itself(old) != _of_itself(new):
            return path or None  # this code differs, not only one inside
        inside = [(a, b) for a, b in zip(*codes, strict=True) if _all_of(a) != _all_of(b)]
        if len(inside) != 1:
            return path or None
        ((old, new),) = inside
        if new.co_flags & inspect.CO_OPTIMIZED:  # not the body of a class
            path.append(new)


def _of_itself(code: CodeType) -> tuple[object, ...]:
    constants = [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def _all_of(code: CodeType) -> tuple[object, ...]:
    return (*_of_itself(code), *(_all_of(c) for c in code.co_consts if isinstance(c, CodeType)))


def put_in(file: str, codes: list[CodeType]) -> None:
    """Give new code to the functions that there are. Modules that are imported later are read from the changed file."""
    gc.unfreeze()
    new = {(code.co_qualname, code.co_firstlineno): code for code in codes}
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename.endswith(f"/{file}"):
            old = function.__code__
            if code := new.get((old.co_qualname, old.co_firstlineno)):
                function.__code__ = code.replace(co_filename=old.co_filename)
