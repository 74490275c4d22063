"""The command `adaptive`: its list of commands, what it imports and when, and errors."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import click
import pytest
from click.testing import CliRunner

from launchers import command
from tests.mpirun import ROOT
from tests.speed import limit


def adaptive(*words):
    return CliRunner().invoke(command.adaptive, words)


@pytest.fixture
def registered(monkeypatch):
    """Registers entry points, and nothing else is."""

    def register(**values: str) -> None:
        entries = {name: EntryPoint(name, value, command.GROUP) for name, value in values.items()}
        monkeypatch.setattr(command, "_registered", lambda: entries)

    return register


def test_listed_commands_are_not_imported():
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom launchers.command import adaptive\n"
        "print(CliRunner().invoke(adaptive, ['--help']).output)\nsys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stderr
    for name, (_, text) in command.OURS.items():
        assert f"  {name}" in done.stdout
        assert text in done.stdout


def test_it_is_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "adaptive", "run", "--show", "-n", "1", "--mpirun", "/nowhere/mpirun", "x.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=limit(100),
    )  # fmt: skip
    assert done.returncode == 2
    assert "Usage: adaptive" in done.stderr


@pytest.mark.parametrize("name", command.OURS)
def test_all_of_ours_are_there(name):
    loaded = EntryPoint(name, command.OURS[name][0], command.GROUP).load()
    assert isinstance(loaded, click.Command)
    assert loaded.name == name


def test_others_are_listed_and_called(registered, tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "import click\n@click.command()\n@click.argument('what')\ndef mine(what): click.echo(what * 2)\nnone = 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registered(run="theirs:mine", mine="theirs:mine", wrong="theirs:none", other="theirs:nothing")
    assert "mine      From theirs." in adaptive("--help").output
    assert adaptive("mine", "ab").output == "abab\n"
    assert "must be a click command, not 5" in adaptive("wrong").output
    assert "'other' (theirs:nothing) cannot be loaded" in adaptive("other").output
    assert (adaptive("nothing").exit_code, "No such command 'nothing'" in adaptive("nothing").output) == (2, True)


def test_another_project_of_the_name_is_found(monkeypatch):
    monkeypatch.setitem(command.OURS, "report", ("no_such_package.command:report", ""))
    assert "cannot be loaded: No module named 'no_such_package'" in adaptive("report").output
    assert "pip uninstall" not in adaptive("report").output
    monkeypatch.setattr(command, "distribution", lambda name: EntryPointless)
    said = adaptive("report").output
    assert "The package named adaptive (1.4.0) is installed. It is another project" in said
    assert "pip uninstall adaptive && pip install --force-reinstall --no-deps adaptive-dataflow==" in said


class EntryPointless:
    """A distribution of another project."""

    version = "1.4.0"


def test_the_version():
    assert adaptive("--version").output.startswith("adaptive-dataflow ")
