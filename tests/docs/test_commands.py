"""Commands in the documentation name scripts, options, targets and extras that there are."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers.command import OURS
from tests.docs.pages import PAGES, ROOT, fences, name

pytestmark = pytest.mark.seconds(10)

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
LAUNCHERS = {"mpirun", "mpiexec", "srun"}
# Not ours to know.
OTHERS = {"apt-get", "cd", "export", "git", "kill", "kubectl", "module", "perf", "sbatch", "source"}


def commands(page: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each command: all lines of `sh` and `bash`, those after a prompt in `console`."""
    for language in ("sh", "bash", "console"):
        for first, block in fences(page, language):
            lines = block.replace("\\\n", "  ").splitlines()
            for number, line in enumerate(lines, first):
                if language != "console" and line.strip() and not line.startswith("#"):
                    yield number, line
                elif line.startswith("$ "):
                    yield number, line.removeprefix("$ ")


def wrong(command: str) -> str | None:
    """What a command names that there is not."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return check(words) if words else None


def check(words: list[str]) -> str | None:
    program, rest = Path(words[0]).name, words[1:]
    if program == "make":
        unknown = [word for word in rest if "=" not in word and word not in TARGETS]
        return f"make has no target {unknown[0]}" if unknown else None
    if program == "pip":
        if any(word.startswith("adaptive-dataflow") for word in rest):
            return "adaptive-dataflow is not published: install '.' in a copy of the repository"
        extras = re.findall(r"\.\[([\w,]+)\]", " ".join(rest))
        unknown = set(",".join(extras).split(",")) - {"", *PYPROJECT["optional-dependencies"]}
        return f"there is no extra {unknown.pop()}" if unknown else None
    if program in LAUNCHERS:
        at = next((i for i, word in enumerate(rest) if Path(word).name == "python"), None)
        return None if at is None else check(rest[at:])
    if program in ("python", "python3"):
        return check_python(rest)
    if program in PYPROJECT["scripts"]:
        return check_command(program, rest)
    if program == "sbatch":
        return check_script(rest)
    return None if program in OTHERS else f"there is no program {program}"


def check_command(program: str, rest: list[str]) -> str | None:
    """`adaptive run …`, and other subcommands by their entry points."""
    if rest and not rest[0].startswith("-") and rest[0] not in {*OURS, "COMMAND"}:
        return f"{program} has no command {rest[0]}"
    script = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
    return None if script is None else check_script(rest[script:])


def check_python(rest: list[str]) -> str | None:
    if rest[:1] == ["-m"]:
        module, rest = rest[1], rest[2:]
        if importlib.util.find_spec(module) is None:
            return f"there is no module {module}"
        if module == "pip":
            return check(["pip", *rest])
        if module != "mpi4py":
            return None
    return check_script(rest) if rest else None


def check_script(rest: list[str]) -> str | None:
    """A script of this repository, and its options; others are the reader's."""
    script = ROOT / rest[0]
    if script.name == "SCRIPT.py" or not rest[0].startswith(("examples/", "benchmarks/")):
        return None
    if not script.exists():
        return f"there is no {rest[0]}"
    source = script.read_text()
    unknown = [word for word in rest[1:] if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
    passed_on = script.suffix == ".sbatch" or "runpy" in source
    return f"{rest[0]} has no option {unknown[0]}" if unknown and not passed_on else None


def test_commands_name_existing_files():
    complaints = [(page, line, command, wrong(command)) for page in PAGES for line, command in commands(page)]
    assert [f"{name(page)}:{line}: {what}: {command}" for page, line, command, what in complaints if what] == []


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("PJRT_NPROC=1 mpirun -n 2 python -m mpi4py examples/listing_2.py", "there is no examples/listing_2.py"),
        ("python -m mpi4py examples/elastic.py --kil 0@190", "examples/elastic.py has no option --kil"),
        ("adaptive rnu -n 2 train.py", "adaptive has no command rnu"),
    ],
)
def test_a_wrong_command_is_seen(command, complaint):
    assert wrong(command) == complaint
