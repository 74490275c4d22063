"""The code in the documentation runs: the blocks of a page one after another, as a reader would paste them.

Comments of HTML, which are not shown, help a page: `<!--- invisible-code-block: python` is set-up for what is, and
`<!--- raises: DriverError -->` says that the next block is refused. None is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.abstract.lexers import LexerCollection
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer

from adaptive import AdaptiveError
from tests.docs.pages import PAGES, ROOT, fences, name, tokens

pytestmark = pytest.mark.seconds(10)


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


@cache
def parser() -> Sybil:
    """Made when the first page is parsed: it takes half a second to find out where it is made."""
    return Sybil(parsers=[PythonCodeBlockParser(), RaisesParser()], path=str(ROOT), patterns=[])


RUN = [page for page in PAGES if "```python" in page.read_text()]  # parsing them takes a second
LONG = {
    "README.md",  # test_outputs.py runs its program
    "docs/federated.md",
    "docs/models.md",
    "docs/policies.md",
    "docs/port.md",
    "docs/recipes.md",
    "docs/sharding.md",
    "docs/sharp_bits.md",
    "docs/strategies.md",
    "docs/tutorial.md",
    "docs/which_noise_scale.md",
}  # they compile much; what they show is tested elsewhere, too
LANGUAGES = {"python", "console", "sh", "bash", "text", "toml"}


def run(page: Path) -> int:
    """Run all blocks of a page, in order. Returns how many there are."""
    document = parser().parse(page)
    document.namespace["__name__"] = "page"
    examples = list(document.examples())
    # A reader's JAX is not as strict as the suite's.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in examples:
            example.evaluate()
    return len(examples)


def case(page: Path) -> pytest.ParameterSet:
    return pytest.param(page, id=name(page), marks=[pytest.mark.long] * (name(page) in LONG))


@pytest.mark.parametrize("page", [case(page) for page in RUN])
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pages write checkpoints and records
    if "make_mesh" not in page.read_text():
        two = jax.local_devices()[:2]
        monkeypatch.setattr(jax, "local_devices", lambda: two)  # comm.world()'s workers: fewer kernels to load
    assert run(page) >= len(list(fences(page, "python")))


def test_every_block_has_a_language():
    """A block without a language would not be tested."""
    fenced = [(page, token) for page in PAGES for token in tokens(page) if token.type == "fence" and token.map]
    assert [f"{name(page)}:{t.map[0] + 1}" for page, t in fenced if t.info.strip() not in LANGUAGES] == []
    assert {page for page, token in fenced if token.info.strip() == "python"} == set(RUN)


def test_a_block_that_is_not_refused_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!--- raises: DataError -->\n```python\nx = 1\n```\n")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run(page)
