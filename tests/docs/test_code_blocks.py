"""The code in the documentation runs: the blocks of a page one after another, as a reader would paste them."""

from __future__ import annotations

import jax
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tests.docs.pages import PAGES, ROOT, fences, name

PYTHON = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], path=str(ROOT), patterns=[])
RUN = [page for page in PAGES if list(fences(page, "python"))]
LONG: set[str] = set()  # pages whose blocks take more than a few seconds


def cases() -> list:
    marks = {page: [pytest.mark.long] * (name(page) in LONG) for page in RUN}
    return [pytest.param(page, marks=marks[page], id=name(page)) for page in RUN]


@pytest.mark.parametrize("page", cases())
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pages write checkpoints and records
    document = PYTHON.parse(page)
    # A reader's JAX is not as strict as the suite's.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in document.examples():
            example.evaluate()


def test_what_is_python_is_marked_as_such():
    """So that no block goes untested because nobody said what it is."""
    unmarked = [
        f"{name(page)}:{line}"
        for page in PAGES
        for line, text in fences(page, "")
        if any(sign in text for sign in ("import ", "def ", "ad.", "comm.", "ctrl.", "mon.", "jax.", "jnp."))
        and not text.lstrip().startswith(("$", "python", "rank", "driver "))
    ]
    assert unmarked == []
