"""What keeps the language and the shape of the packages: checkers that read source text, and return complaints.

Each returns complaints by a key, mostly a file. How many of them a key may have is in `tests/allowances.py`, which only
shrinks: `python -m tests.language` deletes what is no longer needed from it. With `--moved` it also takes over what
there is under other names now, if that is no more in sum.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import of
from tests.of import PACKAGES, ROOT

Complaints = dict[str, list[str]]
SCRIPTS = ("benchmarks", "examples")

# Not what engineers write, or a word with another meaning in the field. Matched in prose, whatever the case.
BANNED = [
    r"\bto go by\b",
    r"\btold\b",
    r"\bbehind (the|its|their|these) steps?\b",
    r"\bdone without\b",
    r"\bwas gone\b",
    r"\bin the course of\b",
    r"\bwhoever\b",
    r"\bto be said\b",
    r"\bmore than we want\b",
    r"\bgoes by how\b",
    r"\bas it comes\b",
    r"\bnobody else there\b",
    r"\bcome to nothing\b",
    r"\bnewcomers?\b",
    r"\brecruits?\b",
    r"\b(rung|seat|ladder)s?\b",
    r"\bhyper-parameters?\b",
    r"(neighbour|behaviour|honour|colour|favour|normalis|synchronis|signalled|modelled|travell)\w*",
]
_BANNED = re.compile("|".join(BANNED), re.IGNORECASE)
# No imperatives: "The mean", "Whether …", "If …", "Returns …", "JAX's settings".
_NO_VERB = re.compile(
    r"(?!Bring\b)(The|An?|This|It|Its|If|Also|Whether|What|When|How|All|Each|Every|Both|No|For|In|With|"
    r"\w+'s|\w*[^s\W]s|\w*ing)\b"
)
# Names with an underscore that are public: of named tuples, and of C.
_NOT_PRIVATE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit", "_pthread_cleanup_push"}
_PYTHONS_OWN = {"os", "sys", "threading", "ctypes"}


@cache
def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse((ROOT / file).read_text())


def files() -> list[str]:
    """Return all source files of the packages."""
    return [p.relative_to(ROOT).as_posix() for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py"))]


def types_of_one_name() -> Complaints:
    """Find names of several classes, by name."""
    found: Complaints = {}
    for file in files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{file}:{node.lineno}: class {node.name}")
    return {name: places[1:] for name, places in found.items() if len(places) > 1}


def raises_without_a_word() -> Complaints:
    """Find errors that a public function raises itself, and its docstring does not name, by file."""
    return _by_file((file, c) for file in files() for c in unnamed_errors(tree_of(file), file))


def unnamed_errors(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield the errors of one file. A method's may be named by its class."""

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


def banned_phrases() -> Complaints:
    """Find banned phrases, by file: in docs, in strings of packages, benchmarks and examples, and in all of tests."""
    scripts = [p.relative_to(ROOT).as_posix() for name in SCRIPTS for p in sorted((ROOT / name).rglob("*.py"))]
    found = [(file, c) for file in [*files(), *scripts] for c in phrases_of(tree_of(file), file)]
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    pages += sorted((ROOT / "benchmarks").rglob("*.md"))
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        lines = enumerate(page.read_text().splitlines(), 1)
        found += [(name, f"{name}:{n}: {m[0]}") for n, line in lines for m in _BANNED.finditer(line)]
    of_tests = (p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "tests").rglob("*.py")))
    found += [(file, c) for file in of_tests for c in phrases_of_lines((ROOT / file).read_text(), file)]
    return _by_file(found)


def phrases_of_lines(text: str, file: str) -> Iterator[str]:
    """Yield the banned phrases in the lines of a test file: names of functions, comments, and everything else."""
    if Path(file).name in ("language.py", "test_language.py"):  # which list and quote them
        return
    for n, line in enumerate(text.splitlines(), 1):
        spoken = line.replace("_", " ") if "def " in line else line
        yield from (f"{file}:{n}: {match[0]}" for match in _BANNED.finditer(spoken))


def phrases_of(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield the banned phrases in the strings of one file, docstrings among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"\s+", " ", node.value)
            yield from (f"{file}:{node.lineno}: {match[0]}" for match in _BANNED.finditer(text))


def docstrings_without_a_verb() -> Complaints:
    """Find functions whose docstring does not begin with an imperative, by file."""
    return _by_file((file, c) for file in files() for c in not_imperative(tree_of(file), file))


def not_imperative(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield the functions of one file whose docstring begins with a word that is no imperative.

    Properties may, whose docstrings are nouns, and commands and scenarios, whose docstrings are shown to users.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not _may_begin_otherwise(node):
            text = ast.get_docstring(node) or ""
            if _NO_VERB.match(text):
                yield f"{file}:{node.lineno}: {node.name}: {text.splitlines()[0]}"


def _may_begin_otherwise(function: ast.FunctionDef) -> bool:
    names = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return bool(re.search(r"property|\bclick\.|\bnamed\b", names))


def private_reach() -> Complaints:
    """Find private names of other modules' objects, by file."""
    return _by_file((file, c) for file in files() for c in reaches(tree_of(file), file))


def reaches(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield each `x._y` of one file where x is not self or cls, unless `_y` is defined in this file."""
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or _is_self(node.value):
            continue
        name = node.attr
        private = name.startswith("_") and not name.startswith("__") and name not in _NOT_PRIVATE
        if not private or name in own:
            continue
        base = ast.unparse(node.value)
        if base.split(".")[0] not in _PYTHONS_OWN and base != "super()":
            yield f"{file}:{node.lineno}: {ast.unparse(node)}"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def modules_without_a_test() -> Complaints:
    """Find modules without a test file in their place, and in no test file's `COVERS`, by module."""
    return _by_file((c.partition(":")[0], c) for c in of.complaints()[0])


def tests_without_a_module() -> Complaints:
    """Find test files of no module, by test file. See `tests/of.py`."""
    return _by_file((c.partition(":")[0], c) for c in of.complaints()[1])


def _by_file(found: object) -> Complaints:
    complaints: Complaints = {}
    for file, complaint in found:  # type: ignore[attr-defined]
        complaints.setdefault(file, []).append(complaint)
    return complaints


CHECKERS = {
    "TYPES_OF_ONE_NAME": types_of_one_name,
    "RAISES_WITHOUT_A_WORD": raises_without_a_word,
    "BANNED_PHRASES": banned_phrases,
    "DOCSTRINGS_WITHOUT_A_VERB": docstrings_without_a_verb,
    "PRIVATE_REACH": private_reach,
    "MODULES_WITHOUT_A_TEST": modules_without_a_test,
    "TESTS_WITHOUT_A_MODULE": tests_without_a_module,
}


def too_many(found: Complaints, allowed: dict[str, int]) -> list[str]:
    """Return the complaints of all keys that have more than they may."""
    return [c for key, places in sorted(found.items()) if len(places) > allowed.get(key, 0) for c in places]


def needed(found: Complaints, allowed: dict[str, int]) -> dict[str, int]:
    """Return the part of an allowance that is still needed."""
    return {key: min(n, len(found[key])) for key, n in sorted(allowed.items()) if found.get(key)}


def write(allowances: dict[str, dict[str, int]]) -> None:
    """Write `tests/allowances.py`."""
    text = '"""How many complaints of `tests/language.py` there may be. Only shrinks: `python -m tests.language`."""\n'
    for name, entries in allowances.items():
        lines = "".join(f'    "{key}": {count},\n' for key, count in sorted(entries.items()))
        text += f"\n{name} = {{\n{lines}}}\n" if lines else f"\n{name}: dict[str, int] = {{}}\n"
    (ROOT / "tests" / "allowances.py").write_text(text)


def main() -> None:
    """Delete from the allowances what is no longer needed. See above."""
    from tests import allowances

    new = {}
    for name, checker in CHECKERS.items():
        found, allowed = checker(), getattr(allowances, name)
        new[name] = {key: len(c) for key, c in found.items()} if "--moved" in sys.argv else needed(found, allowed)
        if sum(new[name].values()) > sum(allowed.values()):
            raise SystemExit(f"{name} may only shrink:\n" + "\n".join(too_many(found, allowed)))
    write(new)


if __name__ == "__main__":
    main()
