"""`python -m collectives.mpirun`: from our command line to another launcher's, and from words to an exit code."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from collectives.mpirun._command import RANK, Implementation, UsageError, clean, line, program, settings, split
from collectives.mpirun._launcher import main
from collectives.mpirun._verdict import Process, verdict

OPEN_MPI, OLD, MPICH = (
    Implementation("mpirun", (5, 0, 11)),
    Implementation("mpirun", (4, 1)),
    Implementation("mpiexec", ()),
)


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ("-n 4 train.py --epochs 3", "-n 4", "train.py --epochs 3"),
        ("-H h1:2,h2:2 --mca btl tcp,self -m train -n 2", "-H h1:2,h2:2 --mca btl tcp,self", "-m train -n 2"),
        ("--oversubscribe /usr/bin/python3.11 -u train.py", "--oversubscribe", "/usr/bin/python3.11 -u train.py"),
        ("-n 2 -- ./start.sh train.py", "-n 2", "./start.sh train.py"),
    ],
)
def test_where_the_program_begins(words, options, rest):
    assert split(words.split()) == (options.split(), rest.split())


@pytest.mark.parametrize("words", ["", "-n 4", "-n 4 ./start.sh", "-n 4 --"])
def test_no_program(words):
    with pytest.raises(UsageError, match="which program"):
        split(words.split())


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("train.py -m x", f"{sys.executable} {RANK} train.py -m x"),
        ("-m train", f"{sys.executable} {RANK} -m train"),
        ("python3 -u -X dev train.py", f"python3 -u -X dev {RANK} train.py"),
        ("python -m mpi4py train.py", f"python {RANK} train.py"),
        ("python -m mpi4py -m train", f"python {RANK} -m train"),
        ("python -c pass", "python -c pass"),
        ("./start.sh train.py", "./start.sh train.py"),
    ],
)
def test_what_ranks_run(words, command):
    assert program(words.split()) == command.split()


def test_what_each_launcher_is_told():
    tail = [sys.executable, str(RANK), "a.py"]
    assert line(OPEN_MPI, ["-n", "2"], ["a.py"], ["V"]) == ["mpirun", "--with-ft", "ulfm", "-x", "V", "-n", "2", *tail]
    assert line(OPEN_MPI, ["--with-ft", "no"], ["a.py"], ["V"]) == ["mpirun", "-x", "V", "--with-ft", "no", *tail]
    assert line(OLD, [], ["a.py"], ["V"]) == ["mpirun", "-x", "V", *tail]
    assert line(MPICH, ["-n", "2"], ["a.py"], ["V"]) == ["mpiexec", "-n", "2", *tail]
    assert settings(OPEN_MPI, [], {})["OMPI_MCA_coll"] == "^han"
    assert "OMPI_MCA_coll" not in settings(OPEN_MPI, [], {"OMPI_MCA_coll": "tuned"})
    assert "OMPI_MCA_coll" not in settings(OPEN_MPI, ["--mca", "coll", "tuned"], {})
    assert settings(OLD, [], {}) == settings(MPICH, [], {}) == {}
    assert clean({"PMIX_RANK": "0", "HOME": "/root"}) == {"HOME": "/root"}


def test_usage(capsys):
    assert main(["--help"]) == 0
    assert "usage: python -m collectives.mpirun" in capsys.readouterr().out
    assert main(["-n", "4"]) == 2
    assert "which program?" in capsys.readouterr().err


def test_the_line_is_shown_and_not_run(capsys):
    done = subprocess.run(
        [sys.executable, "-m", "collectives.mpirun", "--show", "-n", "2", "no such.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout)[-1] == "no such.py"


def process(rank: int = 0, **known) -> Process:
    return Process("job", rank, 3, "here", 1, **{"connected": False, **known})


@pytest.mark.parametrize(
    ("processes", "own", "code"),
    [
        ([process(ended=0), process(ended=0)], 0, 0),
        ([process(ended=0), process(worlds=1)], 137, 0),  # it died in its world
        ([process(ended=0), process()], 0, 1),  # behind it
        ([process(ended=0), process()], 139, 139),
        ([process(worlds=1), process(worlds=1)], 0, 1),  # all did
        ([process(ended=0), process(ended=3), process(ended=1)], 0, 3),
        ([process(ended=1, heard=True), process(ended=3), process(ended=4)], 0, 3),
        ([process(ended=1, heard=True), process(worlds=1)], 0, 1),
        ([process(ended=0), process(left=True, ended=None)], 0, 0),
        ([process(left=True)], 5, 5),
        ([process(ended=0)], None, 0),  # mpirun had to be ended
        ([process(worlds=1)], None, 1),
        ([], 7, 7),
        ([], 0, 0),
    ],
)
def test_whether_a_job_ended_well(processes, own, code):
    assert verdict(processes, own) == code
