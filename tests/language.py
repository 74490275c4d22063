"""What keeps the language and the shape of the packages: checkers that read source text, and return complaints.

Each returns a list of complaints, `file:line: what`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, partial

from tests.mpirun import ROOT

PACKAGES = ("adaptive", "collectives", "controllers", "launchers", "monitors")
SCRIPTS = ("benchmarks", "examples")

# Not what engineers write, or a word with another meaning in the field. Matched in prose at the beginning of a word,
# whatever the case.
BANNED = [
    r"to go by\b",
    r"told\b",
    r"behind (the|its|their|these) steps?\b",
    r"done without\b",
    r"was gone\b",
    r"in the course of\b",
    r"whoever\b",
    r"to be said\b",
    r"more than we want\b",
    r"goes by how\b",
    r"as it comes\b",
    r"nobody else there\b",
    r"come to nothing\b",
    r"newcomers?\b",
    r"recruits?\b",
    r"(rung|seat|ladder)s?\b",
    r"hyper-parameters?\b",
]
_BRITISH = r"(neighbour|behaviour|honour|colour|favour|normalis|synchronis|signalled|modelled|travell)\w*"
_BANNED = re.compile(rf"\b({'|'.join(BANNED)})|{_BRITISH}", re.IGNORECASE)  # one \b: fewer places are tried


@cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source text."""
    return ast.parse(source)


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a tree: to walk it takes longer than to parse it."""
    return list(ast.walk(tree))


def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return parsed((ROOT / file).read_text())


def files() -> list[str]:
    """Return all source files of the packages."""
    return [p.relative_to(ROOT).as_posix() for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py"))]


def of_each_file(checker: Callable[[ast.Module, str], Iterator[str]]) -> list[str]:
    """Return the complaints of a checker about all source files of the packages."""
    return [complaint for file in files() for complaint in checker(tree_of(file), file)]


def types_of_one_name() -> list[str]:
    """Find names of several classes."""
    found: dict[str, list[str]] = {}
    for file in files():
        for node in nodes_of(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{file}:{node.lineno}: class {node.name}")
    return [place for places in found.values() for place in places[1:]]


def unnamed_errors(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield the errors that a public function raises itself, and neither its docstring nor its class's names."""

    def visit(body: list[ast.stmt], owner: str, about: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from visit(node.body, f"{owner}{node.name}.", ast.get_docstring(node) or "")
            elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
                text = about * (node.name == "__init__") + (ast.get_docstring(node) or "")
                if any("click.command" in ast.unparse(d) for d in node.decorator_list):
                    continue  # the docstring is the command's help
                for name in sorted(set(_raised(node)) - {"NotImplementedError", "AssertionError"}):
                    if not re.search(rf"\b{name}\b", text):
                        yield f"{file}:{node.lineno}: {owner}{node.name} raises {name}: not in its docstring"

    yield from visit(tree.body, "", "")


def _raised(function: ast.FunctionDef) -> Iterator[str]:
    """Names of the classes of errors that are raised in a function itself, not in one inside it."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = raised.attr if isinstance(raised, ast.Attribute) else getattr(raised, "id", "")
            if name[:1].isupper():
                yield name
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack += ast.iter_child_nodes(node)


def banned_phrases() -> list[str]:
    """Find banned phrases in docs, and in strings of packages, benchmarks and examples."""
    scripts = [p.relative_to(ROOT).as_posix() for name in SCRIPTS for p in sorted((ROOT / name).rglob("*.py"))]
    found = [c for file in [*files(), *scripts] for c in phrases_of(tree_of(file), file)]
    pages = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    for page in [*pages, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]:
        lines = enumerate(page.read_text().splitlines(), 1)
        found += [f"{page.relative_to(ROOT)}:{n}: {m[0]}" for n, line in lines for m in _BANNED.finditer(line)]
    return found


def phrases_of(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield the banned phrases in the strings of one file, docstrings among them."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"\s+", " ", node.value)
            yield from (f"{file}:{node.lineno}: {match[0]}" for match in _BANNED.finditer(text))


CHECKERS: dict[str, Callable[[], list[str]]] = {
    "types of one name": types_of_one_name,
    "errors that no docstring names": partial(of_each_file, unnamed_errors),
    "banned phrases": banned_phrases,
}
