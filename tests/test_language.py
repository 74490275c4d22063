"""The checkers of the packages' language see what they are for, and no allowance is larger than it needs to be."""

from __future__ import annotations

import ast

import pytest

from tests import allowances
from tests.language import (
    CHECKERS,
    needed,
    not_imperative,
    phrases_of,
    reaches,
    too_many,
    unnamed_errors,
)

pytestmark = pytest.mark.seconds(10)


@pytest.mark.parametrize("name", CHECKERS)
def test_allowances_are_what_is_needed(name):
    found, allowed = CHECKERS[name](), getattr(allowances, name)
    still = needed(found, allowed)
    stale = [f"{key!r}: {n} → {still.get(key, 'delete it')}" for key, n in allowed.items() if still.get(key) != n]
    complaints = too_many(found, allowed)
    assert not complaints, f"{name}:\n" + "\n".join(complaints)
    assert stale == [], f"{name} in tests/allowances.py is to shrink. Run:  python -m tests.language"


def errors(source):
    return [text.split(": ", 1)[1] for text in unnamed_errors(ast.parse(source), "f.py")]


def test_an_error_that_a_docstring_does_not_name_is_seen():
    body = "    raise ValueError('no')\n"
    says = "f raises ValueError: not in its docstring"
    assert errors(f"def f():\n    '''Do.'''\n{body}") == [says]
    assert errors(f"def f():\n    '''Do.\n\n    Raises:\n      ValueError: always.\n    '''\n{body}") == []
    assert errors(f"def f():\n    if 1:\n    {body}") == [says]
    assert errors(f"def f():\n    def g():\n    {body}") == []
    assert errors(f"def _f():\n{body}") == []
    assert errors("def f():\n    try:\n        g()\n    except OSError:\n        raise\n") == []
    assert errors("def f():\n    raise errors.MyError from None\n") == [says.replace("ValueError", "MyError")]


def test_a_banned_phrase_is_seen_across_lines():
    found = phrases_of(ast.parse("'''It has nothing to go\nby.'''\nx = f'{y} was told of neighbours'\n"), "f.py")
    assert [text.partition(": ")[2] for text in found] == ["to go by", "told", "neighbours"]
    assert list(phrases_of(ast.parse("'''Return the measurements.'''"), "f.py")) == []


@pytest.mark.parametrize("text", ["The mean, simply.", "Returns the mean.", "Whether it is.", "JAX's settings."])
def test_a_first_line_that_is_not_imperative_is_seen(text):
    function = f"def mean():\n    '''{text}'''\n"
    assert list(not_imperative(ast.parse(function), "f.py")) == [f"f.py:1: mean: {text}"]
    assert list(not_imperative(ast.parse("@property\n" + function), "f.py")) == []


def test_private_names_of_others_are_seen():
    def found(source):
        return [text.partition(": ")[2] for text in reaches(ast.parse(source), "f.py")]

    assert found("program._engine.kernels") == ["program._engine"]
    assert found("self._engine\ncls._made\nos._exit(1)\nx._replace(y=1)\nx.__class__") == []
    assert found("class C:\n    def __init__(self, other):\n        self._n = other._n") == []


def test_allowances_only_shrink():
    found = {"a.py": ["a.py:1: x", "a.py:2: y"], "b.py": ["b.py:1: x"]}
    assert too_many(found, {"a.py": 1, "b.py": 1}) == found["a.py"]
    assert too_many(found, {"a.py": 2, "b.py": 1}) == []
    assert needed(found, {"a.py": 3, "b.py": 1, "c.py": 4}) == {"a.py": 2, "b.py": 1}
