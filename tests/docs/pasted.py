"""Paste the blocks of a page into Python's prompt, line by line, and write down what each prints.

python -m tests.docs.pasted docs/tutorial.md out.json
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from code import InteractiveConsole
from pathlib import Path

from tests.docs.pages import fences


class Prompt(InteractiveConsole):
    """Python's prompt; records its errors."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__"})
        self.errors = ""

    def write(self, data: str) -> None:
        self.errors += data


def pasted(blocks: list[str]) -> list[dict[str, str]]:
    """What each block printed, and what went wrong."""
    prompt, found = Prompt(), []
    for block in blocks:
        prompt.errors = ""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for line in [*block.splitlines(), ""]:
                prompt.push(line)
        found.append({"printed": out.getvalue(), "errors": prompt.errors})
    return found


if __name__ == "__main__":
    page, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(pasted([text for _, text in fences(page.resolve(), "python")])))
