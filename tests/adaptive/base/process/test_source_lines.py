"""Lines of scripts and of notebook cells, as errors name them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from adaptive.base.process.source_lines import name_line

CELL = "/tmp/ipykernel_4711/3375174423.py"


def test_a_cell_is_named_as_ipython_names_it(monkeypatch):
    compiler = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == CELL else None)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compiler))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert name_line(CELL, 5) == "cell In[3], line 5"
    assert name_line("/home/me/train.py", "5") == "train.py:5"
