"""The language of the packages: its checkers find nothing."""

from __future__ import annotations

import ast

import pytest

from tests.language import CHECKERS, unnamed_errors

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
