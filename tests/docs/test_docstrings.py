"""Examples in docstrings run; those that are skipped, as parts of a driver, use names and arguments that exist."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
import controllers as ctrl
import monitors as mon
from tests.language import PACKAGES

pytestmark = pytest.mark.seconds(10)

ROOT = Path(__file__).parents[2]
DOORS = {"ad": ad, "comm": comm, "sync": sync, "ctrl": ctrl, "mon": mon}
FILES = sorted(
    file.relative_to(ROOT) for name in PACKAGES for file in (ROOT / name).rglob("*.py") if ">>> " in file.read_text()
)


def module_of(file: Path):
    return importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))


def unknown(source: str) -> list[str]:
    """Return what an example takes from the packages although it is not there: names, and arguments of functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else node
        if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in DOORS):
            continue
        thing = getattr(DOORS[called.value.id], called.attr, None)
        if thing is None:
            found.append(ast.unparse(called))
        elif isinstance(node, ast.Call):
            known = inspect.signature(thing).parameters.values()
            if all(p.kind != p.VAR_KEYWORD for p in known):
                names = {p.name for p in known}
                found += [f"{ast.unparse(called)}({k.arg}=)" for k in node.keywords if k.arg not in {None, *names}]
    return found


@pytest.mark.parametrize("file", [str(file) for file in FILES])
def test_examples(file):
    module, runner = module_of(Path(file)), doctest.DocTestRunner()
    found = doctest.DocTestFinder().find(module, extraglobs=DOORS)
    examples = [test for test in found if test.examples]
    assert examples
    for test in examples:
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not said, "".join(said)
        for example in test.examples:
            assert unknown(example.source) == [], example.source


def test_a_name_and_an_argument_that_do_not_exist_are_found():
    assert unknown("mon.nois(grads)\nx = ad.step_number + ad.steps") == ["mon.nois", "mon.nois", "ad.steps"]
    assert unknown("ctrl.hook(fn, value, evry=2, **more)") == ["ctrl.hook(evry=)"]
