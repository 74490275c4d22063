"""`adaptive doctor`: what it finds in made-up surroundings, alone, and as a job of two ranks."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from collectives.doctor import command, examine
from collectives.doctor.examine import Examination, as_examination, examine_process
from collectives.doctor.facts import PACKAGES, JobFacts
from collectives.doctor.findings import (
    HealthCheck,
    clock_findings,
    folder_findings,
    job_findings,
    launcher_findings,
    link_findings,
    process_findings,
)
from collectives.doctor.host_pairs import HostPair
from collectives.doctor.measure import ExchangeTimes, Folder, LinkTimes, folder, kind
from collectives.doctor.show import show
from collectives.worlds.launch import check_agreement, no_mpi
from launchers.mpirun import Implementation, UsageError
from tests.mpirun import run

COVERS = (
    "collectives/doctor/command.py",
    "collectives/doctor/facts.py",
    "collectives/doctor/findings.py",
    "collectives/doctor/measure.py",
    "collectives/doctor/show.py",
)

VERSIONS = {**dict.fromkeys(PACKAGES, "1.0"), "jax": "0.10.0"}
WELL = JobFacts("a", 1, cpus=(0, 1, 2, 3), logical=4, python="3.11", versions=VERSIONS, code="1.0")
OPEN_MPI = "Open MPI v5.0.11, package: …"
RANK = replace(WELL, launcher="Open MPI's mpirun", launched=2, processes=2, library=OPEN_MPI, survives=True, threads=2)
GPU = replace(RANK, devices=("H100 (gpu:0)",), visible="0", gpus=2)


def only(findings, level="wrong") -> HealthCheck:
    (one,) = findings
    assert one.level == level
    return one


def test_nothing_is_found_where_all_is_well():
    assert list(process_findings(WELL)) == []
    assert list(job_findings([RANK, replace(RANK, rank=1)])) == []
    assert list(job_findings([GPU, replace(GPU, visible="1")])) == []
    assert list(job_findings([replace(GPU, gpus=1, limited=True)] * 2)) == []  # ranks that share a GPU
    assert list(launcher_findings(Implementation("mpirun", "Open MPI", (5,)), RANK)) == []


@pytest.mark.parametrize(
    ("facts", "what", "do"),
    [
        ({"tasks": 32}, "Slurm has 32 tasks for this job, but they were not started", "adaptive run -n 32 "),
        ({"intruder": "another project"}, "another project", "pip uninstall adaptive && "),
        ({"code": "1.1"}, "1.0 is installed on a, but 1.1 is imported", "pip install -e ."),
        ({"versions": {**VERSIONS, "flax": "missing"}}, "a lacks flax", "pip install flax"),
        ({"quota": 1.5}, "is limited to 1.5 cores' time but sees 4", "export PJRT_NPROC=2"),
        ({"gpus": 8}, "a has 8 NVIDIA GPUs, but JAX computes on the CPU", 'pip install -U "jax[cuda12]"'),
        ({"devices": (), "no_devices": "no driver"}, "no devices on a: no driver", "jax.devices()"),
        ({"versions": {**VERSIONS, "jax-cuda12-plugin": "0.9"}}, "jax-cuda12-plugin is 0.9, but jaxlib is", "[cuda12]"),
    ],
)  # fmt: skip
def test_of_one_process(facts, what, do):
    found = only(process_findings(replace(WELL, **facts)))
    assert what in found.what
    assert do in found.do


@pytest.mark.parametrize(
    "facts",
    [{"quota": 1.5, "threads": 1}, {"quota": 8.0}, {"gpus": 1, "platforms": "cpu"}, {"gpus": 1, "visible": "-1"}],
)
def test_a_sound_configuration_passes(facts):
    assert list(process_findings(replace(WELL, **facts))) == []


def test_ranks_without_a_connection_get_the_command_to_type():
    with pytest.raises(Exception, match="alone") as error:
        check_agreement(1, "MPICH Version: 4.2", {"OMPI_COMM_WORLD_SIZE": "2"})
    found = only(job_findings([replace(RANK, cpus=(0,), trouble=str(error.value))]))
    assert "Open MPI's mpirun started 2 processes, but MPI finds each of them alone: mpi4py uses\n" in found.what
    assert found.do.startswith("Start the job with the launcher of that MPI:\n    adaptive run -n 2 ")
    found = only(job_findings([replace(RANK, trouble=str(no_mpi(ImportError("no libmpi"), {})))]))
    assert found.what == "MPI cannot be loaded: no libmpi."
    assert "pip install" in found.do
    found = only(
        launcher_findings(Implementation("/x/mpirun", "Open MPI", (5,)), replace(WELL, library="MPICH Version:\t4.2"))
    )
    assert "/x/mpirun belongs to Open MPI 5, but mpi4py loads MPICH Version: 4.2" in found.what


@pytest.mark.parametrize(
    ("ranks", "level", "what", "do"),
    [
        ([replace(RANK, threads=0)] * 2, "wrong", "a: 2 ranks on one host start 8 computing threads on 4 cores.",
         "adaptive run -n 2 … does it. By hand: give each rank cores of its own"),
        ([replace(RANK, threads=1)] * 5, "note", "a: 5 ranks on 4 cores", ""),
        ([replace(RANK, cpus=(0,)), replace(RANK, cpus=(1,))], "note",
         "2 ranks may use 2 of 4 cores", "adaptive run -n 2"),
        ([RANK, replace(RANK, versions={**VERSIONS, "jax": "2.0"})], "wrong",
         "jax is not the same on all ranks: 0.10.0 on rank 0, 2.0 on rank 1", "pip install jax==0.10.0"),
        ([RANK, *[replace(RANK, python="3.12", threads=1)] * 3], "wrong",
         "3.11 on rank 0, 3.12 on ranks 1–3", "same Python"),
        ([RANK, replace(RANK, processor="another")], "note", "Processors differ", ""),
        ([replace(RANK, survives=False)] * 2, "note", "started without fault tolerance", "adaptive run -n 2"),
        ([replace(RANK, survives=False, library="MPICH")] * 2, "note", "this MPI has no fault tolerance", "[openmpi]"),
        ([replace(GPU, devices=("H100",) * 2, visible="")] * 2, "wrong",
         "2 ranks see 2 GPUs each", "--gpus-per-host 2"),
        ([GPU, GPU], "wrong", "2 ranks share a GPU", "--gpus-per-host 2"),
        ([replace(GPU, gpus=1)] * 2, "note", "2 ranks share a GPU", "MEM_FRACTION=0.45"),
    ],
)  # fmt: skip
def test_of_a_job(ranks, level, what, do):
    found = only(job_findings(ranks), level)
    assert what in found.what
    assert do in found.do


def test_of_clocks():
    ranks = [RANK, replace(RANK, host="b"), replace(RANK, host="b"), replace(RANK, host="c")]
    links = [LinkTimes(1, 1e-6, 1e9, 2.0, 0.01), LinkTimes(2, 1e-6, 1e9, 2.0, 0.01), LinkTimes(3, 1e-6, 1e9, 5.0, 4.95)]
    assert "The clock of b is 2 s ahead of that of a" in only(clock_findings(ranks, links)).what
    assert "3 s behind" in only(clock_findings(ranks, [replace(links[0], offset=-3.0)])).what


def test_of_links():
    ranks = [RANK, RANK, *(replace(RANK, host=host) for host in "bbcd")]
    speeds = {(0, 2): 1e9, (0, 4): 0.4e9, (0, 5): 0.9e9, (2, 4): 0.3e9, (2, 5): 1e9, (4, 5): 0.35e9}
    pairs = [HostPair(pair, speed) for pair, speed in speeds.items()]
    slow = only(link_findings(ranks, pairs), "note")
    assert slow.what.startswith("The link of c is slow: at most 0.4 GB/s to any other host, where others have 1 GB/s.")
    assert "ssh c ethtool" in slow.do
    between = [replace(pair, bandwidth=0.2e9 if pair.ranks == (0, 5) else 1e9) for pair in pairs]
    slow = only(link_findings(ranks, between), "note")
    assert slow.what.startswith("The link between a and d is slow: 0.2 GB/s, where each has 1 GB/s to other hosts.")


def test_of_folders(tmp_path):
    ranks = [RANK, replace(RANK, host="b")]
    seen = Folder("/x", "ext4", 1, "", (1,))
    assert "/x on a is not the folder of that name on b" in only(folder_findings(ranks, seen, asked=False), "note").what
    only(folder_findings(ranks, seen, asked=True))
    result = replace(seen, trouble="Permission denied", unseen=())
    assert "cannot be written to on a: Permission denied" in only(folder_findings(ranks, result, asked=True)).what
    assert list(folder_findings(ranks, replace(seen, unseen=()), asked=True)) == []


def test_a_folder_that_only_some_see(tmp_path, monkeypatch):
    monkeypatch.setattr("collectives.doctor.measure.SEEN_SECONDS", 0.1)
    assert folder(tmp_path, lambda own: [own], 0).unseen == ()
    assert list(tmp_path.iterdir()) == []

    def gather_and_clean_up(own):
        for file in tmp_path.iterdir():
            if own == b"1":
                file.unlink()
        return [own]

    assert folder(tmp_path, gather_and_clean_up, 0).unseen == ()
    answers = iter([[b"there\n"], [b"1", b"0"]])
    there = folder(tmp_path, lambda own: next(answers), 1)
    assert (there.unseen, there.trouble) == ((1,), "")
    result = folder(tmp_path / "nowhere", lambda own: [own], 0)
    assert (result.trouble, result.unseen) == ("No such file or directory", ())


def test_which_file_system():
    mounts = {"/": "ext4", "/proc": "nfs"}
    assert kind(Path("/proc/self"), mounts) in ("nfs", "ext4")
    assert kind(Path("/usr"), mounts) == "ext4"
    assert kind(Path("/usr"), {}) == ""


# --- alone ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_hand(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OMPI_COMM_", "PMI", "SLURM_"))]:
        monkeypatch.delenv(name)


@pytest.mark.ranks
@pytest.mark.usefixtures("by_hand")
def test_alone_it_starts_a_job_of_two_ranks(tmp_path):
    done = CliRunner().invoke(command.doctor, ["--json", "--path", str(tmp_path), "--timeout", "100"])
    said = json.loads(done.stdout)
    assert said["ok"] == (done.exit_code == 0)
    assert not [finding for finding in said["findings"] if "ranks" in finding["what"]], said["findings"]
    trial = said["trial"]
    assert [own["processes"] for own in trial["ranks"]] == [2, 2]
    assert [link["rank"] for link in trial["links"]] == [1]
    assert trial["folder"]["unseen"] == []
    assert "trial" in asdict(as_examination(said))
    assert as_examination(said).trial == as_examination(trial)


@pytest.mark.usefixtures("by_hand")
def test_alone_in_a_job_of_slurms(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_NTASKS", "32")
    done = CliRunner().invoke(command.doctor, ["--no-trial", "--path", str(tmp_path)], env={"COLUMNS": "300"})
    assert done.exit_code == 1
    assert "✗ Slurm has 32 tasks for this job" in done.stdout
    assert "\n        adaptive run -n 32 " in done.stdout


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
    found = examine_process(tmp_path, trial=True, seconds=seconds)
    assert why in only([f for f in found.findings if "ranks" in f.what]).what
    assert ("no pmix" in found.findings[-1].what) == (seconds == 60)
    assert not found.ok


@pytest.mark.usefixtures("by_hand")
def test_without_an_mpirun_one_process_works(monkeypatch, tmp_path):
    def find():
        raise UsageError("there is no mpirun anywhere. Install an MPI:\n    pip install x")

    monkeypatch.setattr(examine, "find", find)
    monkeypatch.setattr(examine, "_library", lambda: "")
    found = examine_process(tmp_path, trial=True, seconds=1)
    assert "needs none" in only([f for f in found.findings if "mpirun" in f.what], "note").what


def test_a_check_that_hangs_is_ended(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    command._give_up(5.0, ["loading MPI", "measuring"])
    assert codes == [1]
    assert "is still measuring after 5 s" in capsys.readouterr().err


# --- a job ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_job_of_two_ranks(tmp_path):
    done = run(["-m", "collectives.doctor", "--json", "--path", tmp_path], n=2)
    said = as_examination(json.loads(done.stdout))
    assert [own.rank for own in said.ranks] == [0, 1]
    assert said.ok
    assert said.exchange is not None
    assert said.links[0].bandwidth > said.exchange.small > 0
    assert abs(said.links[0].offset) < 1  # one host, one clock


@pytest.mark.ranks
def test_ranks_that_are_alone_speak_once(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import os\n"
        "os.environ['OMPI_COMM_WORLD_SIZE'] = '4'  # as a launcher that this MPI does not listen to would\n"
        "from collectives.doctor.command import doctor\n"
        "doctor(['--json'])\n"
    )
    said = as_examination(json.loads(run(script, n=1, expect_failure=True).stdout))
    assert "MPI finds each of them alone" in only(said.findings).what


def test_it_is_shown_for_people():
    ranks = tuple(replace(RANK, rank=i, host=f"node{i // 2}", cpus=(i % 2,)) for i in range(80))
    found = Examination(
        ranks,
        (HealthCheck("note", "a note"), HealthCheck("wrong", "something is wrong", "line 1\nline 2")),
        tuple(LinkTimes(i, i * 1e-6, 1e9, 1e-3, 1e-5) for i in range(1, 80)),
        tuple(HostPair((0, i), i * 1e8) for i in range(2, 80, 2)),
        ExchangeTimes(1e-6, 0.02),
        Folder("/shared", "nfs", 10**12, "", (4, 7)),
    )
    show(found, console := Console(record=True, width=150, file=io.StringIO()))
    said = console.export_text()
    for text in (
        "80 ranks on 40 hosts", "1 to 79 µs, 1 GB/s", "host ↔ host      0.2 to 7.8 GB/s, each way at once",
        "Allreduce of 8 bytes 1 µs, of 16 MiB 20 ms",
        "clocks           at most 1 ms", "/shared: nfs, 1e+03 GB free, not seen by ranks 4, 7",
        "0 | 1   2 each", "… 8 more hosts",
        "✗ something is wrong\n    line 1\n    line 2\n· a note\n1 problem",
    ):  # fmt: skip
        assert text in said, said
