"""What the readme and the tutorial show as printed is printed, by the programs beside it."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from code import InteractiveConsole
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import collectives as comm
from controllers import balance
from controllers.simulate import scenario
from controllers.simulate import simulate as simulated
from controllers.simulate._command import simulate
from tests.docs.outputs import differs, printed_below, session
from tests.docs.pages import ROOT, fences
from tests.mpirun import run

README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"


def file_of(page: Path, path: Path, epochs: int = 20) -> Path:
    """The blocks of a page in a file, as the page says to save them; with fewer epochs, by request."""
    text = "\n\n".join(text for _, text in fences(page, "python"))
    path.write_text(text.replace("epochs=20", f"epochs={epochs}"))
    return path


@pytest.fixture
def digits(monkeypatch) -> None:
    """scikit-learn's, without the seconds that it takes to import."""
    (package,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr]
    table = np.loadtxt(Path(package) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    loads = SimpleNamespace(load_digits=lambda return_X_y: (table[:, :-1], table[:, -1].astype(int)))
    monkeypatch.setitem(sys.modules, "sklearn", SimpleNamespace(datasets=loads))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", loads)


@pytest.mark.ranks
@pytest.mark.on_ranks(2)
def test_the_readmes_program_prints_the_shown_lines_on_one_of_two_ranks(tmp_path, digits, capsys):
    shown, varies = session(README, "adaptive run -n 2 train.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(file_of(README, tmp_path / "train.py", epochs=2)), run_name="__main__")
    with comm.world() as world:
        first, second = (said.decode() for said in world.all_gather_bytes(capsys.readouterr().out.encode()))
    assert second == ""
    assert varies
    assert differs(shown, first, varies=True) == ""


@pytest.mark.long
@pytest.mark.ranks
def test_the_readmes_command_runs_its_program(tmp_path):
    shown, _ = session(README, "adaptive run -n 2 train.py")
    printed = run(file_of(README, tmp_path / "train.py"), 2, ours=True).stdout
    assert differs(shown, printed, varies=True) == ""
    steps = [line.split()[0] for line in printed.splitlines()]
    assert len(steps) == len(set(steps)), "one rank prints"
    assert abs(len(steps) - len(shown.splitlines())) <= 2, "an epoch has about as many steps"


@pytest.mark.seconds(3)  # 600 steps of all policies
def test_the_simulation_that_the_readme_shows():
    """But its picture, which takes longer: tests/controllers/simulate draws one."""
    shown, varies = session(README, "adaptive simulate step_change --png step_change.png")
    done = CliRunner().invoke(simulate, ["step_change"])
    assert (done.exit_code, varies) == (0, False)
    assert differs(shown, done.output) == ""


def test_balance_adapts_as_fast_as_the_readme_claims():
    made = scenario("step_change")
    sizes = simulated(balance(), made.cluster, made.global_batch, 600).sizes
    others = [step + 1 for step in range(1, 600) if (sizes[step] != sizes[step - 1]).any()]
    (text,) = [line for line in README.read_text().splitlines() if "new sizes in steps" in line]
    first, second = map(int, re.findall(r"in steps (\d+) and (\d+)", text)[0])
    assert {first, second} <= set(others)
    assert not set(range(200, first)) & set(others)
    assert not set(range(400, second)) & set(others)


@pytest.mark.long
def test_the_tutorial_can_be_pasted_and_prints_the_shown_output(tmp_path, monkeypatch):
    """Into Python's prompt, line by line."""
    monkeypatch.chdir(tmp_path)
    prompt, errors, complaints = InteractiveConsole({"__name__": "__main__"}), [], []
    monkeypatch.setattr(prompt, "write", errors.append)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for line, text, shown in printed_below(TUTORIAL):
            errors.clear()
            with contextlib.redirect_stdout(io.StringIO()) as out:
                for pasted in [*text.splitlines(), ""]:
                    prompt.push(pasted)
            why = "".join(errors) or (differs(shown, out.getvalue()) if shown is not None else "")
            complaints += [f"line {line}: {why}"] if why else []
    assert complaints == []
    assert sum(shown is not None for *_, shown in printed_below(TUTORIAL)) >= 7


@pytest.mark.long
def test_the_tutorials_blocks_are_a_program_for_several_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Two ranks load a small machine less than four.
    run(file_of(TUTORIAL, tmp_path / "train.py"), 2, ours=True, timeout=280)


# --- how that is compared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "got", "why"),
    [
        ("a 1\n", "a 1.01\n", ""),
        ("a 1\n", "a 1.1\n", "'a 1' is shown, and 'a 1.1' was printed"),
        ("a 1\nb\n", "a 1\n", "'b' is shown, and was not printed"),
        ("a 1\n", "a 1\nb\n", "'b' was printed, and is not shown"),
        ("a\n…\nd\n", "a\nb\nc\nd\n", ""),
        ("a\n…\nd\n", "a\nb\nc\n", "'d' is shown, and was not printed"),
    ],
)
def test_outputs_are_compared_by_words_and_by_numbers(shown, got, why):
    assert differs(shown, got) == why
