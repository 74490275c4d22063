"""Lines of scripts and of notebook cells, as errors name them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from adaptive.base.process.source_lines import name_line

CELL = "/tmp/ipykernel_4711/3375174423.py"


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("/home/me/train.py", "train.py:5"),
        (CELL, "notebook cell, line 5"),
        (r"C:\Temp\ipykernel_4711\3375174423.py", "notebook cell, line 5"),
        ("<ipython-input-3-0123abcd>", "notebook cell, line 5"),
        ("/home/me/3375174423.py", "3375174423.py:5"),
    ],
)
def test_a_line_is_named_by_its_file_or_as_a_cell(file, named, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert name_line(file, 5) == named


def test_a_cell_is_named_as_ipython_names_it(monkeypatch):
    compiler = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == CELL else None)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compiler))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert name_line(CELL, 5) == "cell In[3], line 5"
    assert name_line("/home/me/train.py", "5") == "train.py:5"
