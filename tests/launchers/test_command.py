"""The command `adaptive`: its list of commands, what it imports and when, and errors."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from launchers import command
from tests.mpirun import ROOT
from tests.speed import limit


def adaptive(*words):
    return CliRunner().invoke(command.adaptive, words)


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


@pytest.mark.parametrize("name", command.OURS)
def test_all_of_ours_are_there(name):
    loaded = command.adaptive.get_command(None, name)
    assert isinstance(loaded, click.Command)
    assert loaded.name == name
    nothing = adaptive("nothing")
    assert (nothing.exit_code, "No such command 'nothing'" in nothing.output) == (2, True)


def test_another_project_of_the_name_is_found(monkeypatch):
    monkeypatch.setitem(command.OURS, "report", ("no_such_package.command:report", ""))
    assert "cannot be loaded: No module named 'no_such_package'" in adaptive("report").output
    assert "pip uninstall" not in adaptive("report").output
    monkeypatch.setattr(command, "distribution", lambda name: SimpleNamespace(version="1.4.0"))
    said = adaptive("report").output
    assert "The package named adaptive (1.4.0) is installed. It is another project" in said
    assert "pip uninstall adaptive && pip install --force-reinstall --no-deps adaptive-dataflow==" in said


def test_the_version_by_the_module():
    line = [sys.executable, "-m", "adaptive", "--version"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    assert done.stdout.startswith("adaptive-dataflow "), done.stderr
