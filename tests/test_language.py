"""The checkers of the packages' language see what they are for, and find nothing."""

from __future__ import annotations

import ast

import pytest

from tests.language import CHECKERS, not_imperative, phrases_of, reaches, unnamed_errors

pytestmark = pytest.mark.seconds(10)


@pytest.mark.parametrize("name", CHECKERS)
def test_there_is_nothing_to_complain_of(name):
    assert CHECKERS[name]() == []


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
