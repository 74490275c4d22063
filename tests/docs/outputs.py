"""The output of a page's blocks, and the output that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import fences, tokens

_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
CLOSE = 0.02  # relative: other CPUs and versions of XLA round otherwise


def printed_below(page: Path) -> list[tuple[int, str, str | None]]:
    """Line and text of each block of Python, and the block of `text` right below it, if there is one."""
    blocks = [token for token in tokens(page) if token.level == 0]
    found = []
    for token, following in zip(blocks, [*blocks[1:], None], strict=True):
        if token.type == "fence" and token.info.strip() == "python":
            shown = following is not None and following.type == "fence" and following.info.strip() == "text"
            found.append(((token.map or [0])[0] + 2, token.content, following.content if shown and following else None))
    return found


def session(page: Path, command: str) -> tuple[str, bool]:
    """The output below a command in a `console` block, and whether a comment above says that numbers vary."""
    for line, block in fences(page, "console"):
        lines = block.splitlines()
        for number, text in enumerate(lines):
            if text == f"$ {command}":
                rest = lines[number + 1 :]
                end = next((i for i, other in enumerate(rest) if other.startswith("$ ")), len(rest))
                above = page.read_text().splitlines()[line - 3]
                return "\n".join(rest[:end]) + "\n", above.strip() == "<!--- output: varies -->"
    raise AssertionError(f"{page} shows no command {command!r}")


def differs(shown: str, got: str, *, varies: bool = False) -> str:
    """Return how a page's output differs from the printed one; "" if it does not.

    Words have to be the same, and numbers close. A line "…" stands for any number of lines.

    Args:
      varies: numbers depend on the machine, but for the first one of each line, and so does the number of lines.
    """
    there, lines = shown.splitlines(), got.splitlines()
    if varies:
        if not there or not lines:
            return "nothing is shown" if not there else "nothing was printed"
        there, lines = there[: len(lines)], lines[: len(there)]
    while there:
        wanted = there.pop(0)
        if wanted == "…":
            if not there:
                return ""
            while lines and _unlike(there[0], lines[0], varies):
                lines.pop(0)
        elif not lines:
            return f"{wanted!r} is shown, and was not printed"
        elif why := _unlike(wanted, lines.pop(0), varies):
            return why
    return f"{lines[0]!r} was printed, and is not shown" if lines else ""


def _unlike(shown: str, got: str, varies: bool) -> str:
    numbers = [[float(n.replace(",", "")) for n in _NUMBER.findall(line)] for line in (shown, got)]
    fixed = numbers[0][:1] if varies else numbers[0]
    same = _NUMBER.sub("0", shown) == _NUMBER.sub("0", got) and len(numbers[0]) == len(numbers[1])
    same = same and all(abs(a - b) <= CLOSE * abs(a) for a, b in zip(fixed, numbers[1], strict=False))
    return "" if same else f"{shown!r} is shown, and {got!r} was printed"
