"""Each module has tests, at its mirrored place or by name in `COVERS`, and the command finds them."""

from __future__ import annotations

import pytest

from tests.of import complaints, covers, files_of, main, mirrored

pytestmark = pytest.mark.seconds(10)


def test_tests_stand_where_their_modules_do():
    assert mirrored("adaptive/runtime/kernels.py") == "tests/adaptive/runtime/test_kernels.py"
    assert mirrored("monitors/_noise.py") == "tests/monitors/test_noise.py"


@pytest.fixture
def repository(tmp_path):
    """A package of two modules; returns a function that writes one test file and returns the complaints."""
    (tmp_path / "monitors").mkdir()
    (tmp_path / "tests" / "monitors").mkdir(parents=True)
    for name in ("__init__", "_noise", "_ema"):
        (tmp_path / "monitors" / f"{name}.py").touch()
    (tmp_path / "tests" / "monitors" / "test_noise.py").touch()

    def found(test, text):
        (tmp_path / test).write_text(text)
        return complaints(tmp_path)

    found.root = tmp_path
    return found


def test_a_module_is_tested_by_its_mirror_or_by_covers(repository):
    without, wrong = repository("tests/test_house.py", "")
    assert (len(without), wrong) == (1, [])
    assert without[0].startswith("monitors/_ema.py: there is no tests/monitors/test_ema.py")
    covering = 'import x\n\nCOVERS = ("monitors/_ema.py", "monitors/_noise.py")\n'
    assert repository("tests/test_together.py", covering) == ([], [])
    assert files_of("monitors/_ema.py", repository.root) == ["tests/test_together.py"]
    assert files_of("monitors/_noise.py", repository.root) == ["tests/monitors/test_noise.py", "tests/test_together.py"]


@pytest.mark.parametrize(
    ("test", "text", "says"),
    [
        ("tests/test_together.py", "", "there is no module of this name in that place"),
        ("tests/monitors/test_average.py", "", "there is no module of this name in that place"),
        (
            "tests/test_together.py",
            'COVERS = ("monitors/noise.py",)',
            "COVERS has monitors/noise.py, which is no module",
        ),
        (
            "tests/monitors/test_noise.py",
            'COVERS = ("monitors/_noise.py",)',
            "is at monitors/_noise.py's place already",
        ),
    ],
)
def test_a_test_file_of_nothing_is_found(repository, test, text, says):
    _, wrong = repository(test, text)
    assert [complaint.startswith(f"{test}: {says}") for complaint in wrong] == [True]


@pytest.mark.parametrize("value", ["['monitors/_ema.py']", "'monitors/_ema.py'", "(NAME,)", "tuple('ab')", "(1,)"])
def test_covers_must_be_literal(tmp_path, value):
    (tmp_path / "test_x.py").write_text(f"NAME = 'a'\nCOVERS = {value}\n")
    with pytest.raises(ValueError, match=r"test_x.py:2: COVERS must be a tuple of paths"):
        covers("test_x.py", tmp_path)


@pytest.mark.parametrize("name", ["monitors/_noise.py", "monitors._noise", "./monitors/../monitors/_noise.py"])
def test_the_command_prints_one_file_a_line(name, capsys):
    main([name])
    assert capsys.readouterr().out.splitlines() == files_of("monitors/_noise.py")


def test_the_command_helps_where_there_is_no_such_module():
    with pytest.raises(
        SystemExit, match=r"monitors/noise.py: no module of the packages. Did you mean monitors/_noise.py"
    ):
        main(["monitors/noise.py"])
