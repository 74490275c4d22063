"""`adaptive doctor`: what it finds in made-up surroundings, alone, and as a job of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from collectives.doctor import command
from collectives.doctor.checks import findings
from collectives.doctor.facts import PACKAGES
from collectives.worlds.launch import check_agreement, no_mpi
from launchers.mpirun import UsageError
from tests import mpirun
from tests.speed import limit

VERSIONS = {"python": "3.11", **dict.fromkeys(PACKAGES, "1.0"), "jax": "0.10.0"}
WELL = {
    "host": "a",
    "rank": 0,
    "launcher": "",
    "library": "",
    "trouble": "",
    "survives": False,
    "cpus": [0, 1, 2, 3],
    "logical": 4,
    "quota": None,
    "threads": 0,
    "devices": ["cpu"],
    "no_devices": "",
    "gpus": 0,
    "visible": "",
    "limited": False,
    "platforms": "",
    "versions": VERSIONS,
    "code": "1.0",
    "intruder": "",
    "tasks": 0,
}
OPEN_MPI = "Open MPI v5.0.11, package: …"
RANK = {**WELL, "launcher": "Open MPI's mpirun", "library": OPEN_MPI, "survives": True, "threads": 2}
GPU = {**RANK, "devices": ["H100 (gpu:0)"], "visible": "0", "gpus": 2}


def only(found, level="wrong"):
    (one,) = found
    assert one.level == level
    return one


@pytest.mark.parametrize(
    "ranks",
    [
        [WELL],
        [RANK, {**RANK, "rank": 1}],
        [GPU, {**GPU, "visible": "1"}],
        [{**GPU, "gpus": 1, "limited": True}] * 2,  # ranks that share a GPU
        [{**WELL, "quota": 1.5, "threads": 1}],
        [{**WELL, "quota": 8.0}],
        [{**WELL, "gpus": 1, "platforms": "cpu"}],
        [{**WELL, "gpus": 1, "visible": "-1"}],
    ],
)
def test_nothing_is_found_where_all_is_well(ranks):
    assert findings(ranks) == []


@pytest.mark.parametrize(
    ("facts", "what", "do"),
    [
        ({"tasks": 32}, "Slurm has 32 tasks for this job, but they were not started", "adaptive run -n 32 "),
        ({"intruder": "another project"}, "another project", "pip uninstall adaptive && "),
        ({"code": "1.1"}, "1.0 is installed on a, but 1.1 is imported", "pip install -e ."),
        ({"quota": 1.5}, "is limited to 1.5 cores' time but sees 4", "export PJRT_NPROC=2"),
        ({"gpus": 8}, "JAX computes on the CPU of a, which has NVIDIA GPUs (8)", 'pip install -U "jax[cuda12]"'),
        ({"devices": [], "no_devices": "no driver"}, "no devices on a: no driver", "jax.devices()"),
        ({"versions": {**VERSIONS, "jax-cuda12-plugin": "0.9"}}, "jax-cuda12-plugin is 0.9, but jaxlib is", "[cuda12]"),
    ],
)  # fmt: skip
def test_of_one_process(facts, what, do):
    found = only(findings([{**WELL, **facts}]))
    assert what in found.what
    assert do in found.what + found.do


def test_ranks_without_a_connection_get_the_command_to_type():
    with pytest.raises(Exception, match="alone") as error:
        check_agreement(1, "MPICH Version: 4.2", {"OMPI_COMM_WORLD_SIZE": "2"})
    found = only(findings([{**RANK, "trouble": str(error.value)}]))
    assert "Open MPI's mpirun started 2 processes, but MPI finds each of them alone: mpi4py uses\n" in found.what
    assert "Start the job with the launcher of that MPI:\n    adaptive run -n 2 " in found.what
    found = only(findings([{**RANK, "trouble": str(no_mpi(ImportError("no libmpi"), {}))}]))
    assert found.what.startswith("MPI cannot be loaded: no libmpi.")
    assert "pip install" in found.what


@pytest.mark.parametrize(
    ("ranks", "level", "what", "do"),
    [
        ([{**RANK, "threads": 0}] * 2, "wrong", "a: 2 ranks on one host start 8 computing threads on 4 cores. Give",
         "adaptive run -n 2 …    does it"),
        ([{**RANK, "logical": 8}, {**RANK, "logical": 8, "rank": 1}], "note", "ranks 0, 1 may use 4 of 8 cores",
         "gives each its share"),
        ([RANK, {**RANK, "versions": {**VERSIONS, "jax": "2.0"}}], "wrong",
         "jax is not the same on all ranks: 0.10.0 on rank 0, 2.0 on rank 1", "pip install jax==0.10.0"),
        ([RANK, *[{**RANK, "versions": {**VERSIONS, "python": "3.12"}, "threads": 1}] * 3], "wrong",
         "3.11 on rank 0, 3.12 on ranks 1, 2, 3", "same Python"),
        ([{**RANK, "survives": False}] * 2, "note", "started without fault tolerance", "adaptive run -n 2"),
        ([{**RANK, "survives": False, "library": "MPICH"}] * 2, "note", "this MPI has no fault tolerance", "[openmpi]"),
        ([{**GPU, "devices": ["H100"] * 2, "visible": ""}] * 2, "wrong",
         "2 ranks see the same GPUs, and each allocates memory on all that it sees (2)", "--gpus-per-host 2"),
        ([GPU, GPU], "wrong", "2 ranks see the same GPUs", "--gpus-per-host 2"),
        ([{**GPU, "gpus": 1}] * 2, "note", "2 ranks share a GPU", "MEM_FRACTION=0.45"),
    ],
)  # fmt: skip
def test_of_a_job(ranks, level, what, do):
    found = only(findings(ranks), level)
    assert what in found.what
    assert do in found.do


def test_it_is_shown_for_people():
    ranks = [{**RANK, "rank": i, "host": f"node{i // 2}", "cpus": [i % 2]} for i in range(80)]
    said = "\n".join(
        command.described(
            {
                "ranks": ranks,
                "findings": [
                    {"level": "note", "what": "a note", "do": ""},
                    {"level": "wrong", "what": "something is wrong", "do": "line 1\nline 2"},
                ],
            }
        )
    )
    for text in (
        "80 ranks on 40 hosts", "ranks 0, 1; cores 0–0 | 1–1; cpu",
        "✗ something is wrong\n    line 1\n    line 2\n· a note\n1 problem",
    ):  # fmt: skip
        assert text in said, said


# --- alone ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_hand(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OMPI_COMM_", "PMI", "SLURM_"))]:
        monkeypatch.delenv(name)


@pytest.mark.ranks
@pytest.mark.usefixtures("by_hand")
def test_alone_it_starts_a_job_of_two_ranks():
    done = CliRunner().invoke(command.doctor, ["--json", "--timeout", "100"])
    said = json.loads(done.stdout)
    assert said["ok"] == (done.exit_code == 0)
    trial = said["trial"]
    assert [own["rank"] for own in trial["ranks"]] == [0, 1]
    assert trial["ok"]


@pytest.mark.usefixtures("by_hand")
def test_alone_in_a_job_of_slurms(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_NTASKS", "32")
    done = CliRunner().invoke(command.doctor, ["--no-trial"])
    assert done.exit_code == 1
    assert "✗ Slurm has 32 tasks for this job" in done.stdout
    assert "\n    adaptive run -n 32 " in done.stdout


@pytest.mark.parametrize(
    ("does", "seconds", "why"),
    [("echo no pmix; exit 3", 60, "ended with exit code 3"), ("exec sleep 60", 1, "did not end within")],
)
@pytest.mark.usefixtures("by_hand")
def test_a_job_that_cannot_be_started(monkeypatch, tmp_path, does, seconds, why):
    launcher = tmp_path / "bin" / "mpirun"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0" && exit\n{does}\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "lib" / "libmpi.so"))
    found = command.examine_process(dict(WELL), trial=True, seconds=seconds)
    (what,) = [finding["what"] for finding in found["findings"] if "ranks" in finding["what"]]
    assert why in what
    assert ("no pmix" in what) == (seconds == 60)
    assert not found["ok"]


@pytest.mark.usefixtures("by_hand")
def test_without_an_mpirun_one_process_works(monkeypatch):
    def find():
        raise UsageError("there is no mpirun anywhere. Install an MPI:\n    pip install x")

    monkeypatch.setattr(command, "find", find)
    found = command.examine_process(dict(WELL), trial=True, seconds=1)
    assert [finding["level"] for finding in found["findings"] if "needs no MPI" in finding["what"]] == ["note"]


def test_a_check_that_hangs_is_ended():
    code = (
        "import time\nfrom collectives.doctor import command\ncommand.launcher = lambda: 'mpirun'\n"
        "def examine_job(own):\n    time.sleep(60)\n"
        "command.examine_job = examine_job\ncommand.doctor(['--timeout', '1'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60), check=False)
    assert done.returncode == 1
    assert "in examine_job" in done.stderr


# --- a job ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_ranks_that_are_alone_speak_once(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import os\n"
        "os.environ['OMPI_COMM_WORLD_SIZE'] = '4'  # as a launcher that this MPI does not listen to would\n"
        "from collectives.doctor.command import doctor\n"
        "doctor(['--json'])\n"
    )
    findings = json.loads(mpirun.run(script, n=1, expect_failure=True).stdout)["findings"]
    (what,) = [finding["what"] for finding in findings if finding["level"] == "wrong"]
    assert "MPI finds each of them alone" in what
