"""The code in the documentation runs: the blocks of a page one after another, as a reader would paste them.

Three comments of HTML, which are not shown, help a page: `<!--- invisible-code-block: python` is set-up for what is;
`<!--- raises: DriverError -->` says that the next block is refused; and `<!--- skip: next "why" -->` that it cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.abstract.lexers import LexerCollection
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer

from adaptive import AdaptiveError
from tests.docs.pages import PAGES, ROOT, fences, name, tokens

LANGUAGES = {"python", "console", "sh", "text", "toml", "bash"}
LONG: set[str] = set()  # pages whose blocks take more than a few seconds


class RaisesParser:
    """`<!--- raises: DriverError -->`: the next block is refused with this error."""

    _lexers = LexerCollection([DirectiveInHTMLCommentLexer("raises")])

    def __call__(self, document: Document) -> Iterator[Region]:
        for region in self._lexers(document):
            yield Region(region.start, region.end, region.lexemes["arguments"].strip(), self.next_raises)

    def next_raises(self, example: Example) -> None:
        expected, document = example.parsed, example.document

        def evaluate(following: Example) -> None:
            document.pop_evaluator(evaluate)
            with pytest.raises(AdaptiveError) as error:
                following.region.evaluator(following)
            assert type(error.value).__name__ == expected

        document.push_evaluator(evaluate)


BLOCKS = Sybil(parsers=[PythonCodeBlockParser(), RaisesParser(), SkipParser()], path=str(ROOT), patterns=[])
RUN = [page for page in PAGES if list(fences(page, "python"))]


def run(document: Document) -> list[str]:
    """Run all blocks, in order; the reasons of those that are skipped."""
    skipped = []
    # A reader's JAX is not as strict as the suite's.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in document.examples():
            document.namespace.setdefault("__name__", "page")
            try:
                example.evaluate()
            except pytest.skip.Exception as reason:
                skipped.append(str(reason))
    return skipped


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.long] * (name(p) in LONG), id=name(p)) for p in RUN])
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pages write checkpoints and records
    assert run(BLOCKS.parse(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page):
    """So that none goes untested because nobody said that it is code."""
    marked = sum(len(list(fences(page, language))) for language in LANGUAGES)
    assert marked == sum(token.type == "fence" for token in tokens(page))
