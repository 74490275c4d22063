"""`adaptive run`: from our command line to that of an MPI's launcher, and from words to an exit code."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launchers import mpirun
from launchers import run as running
from launchers.mpirun import RANK, Host, Implementation, UsageError, clean, find, line, settings
from launchers.rank import run as run_in_rank
from launchers.resources import GPUS, THREADS, cores, cpu_quota, see_own_gpus, take_cores, usable
from tests.mpirun import ROOT
from tests.speed import limit

OPEN_MPI, OLD = Implementation("mpirun", "Open MPI", (5, 0, 11)), Implementation("mpirun", "Open MPI", (4, 1))
MPICH = Implementation("mpiexec", "MPICH", (4, 2))


# --- what stands before the program, and what ranks run ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ("-n 4 train.py --epochs 3", "-n 4", "train.py --epochs 3"),
        ("-H h1:2,h2:2 --mca btl tcp,self -m train -n 2", "-H h1:2,h2:2 --mca btl tcp,self", "-m train -n 2"),
        ("--oversubscribe /usr/bin/python3.11 -u train.py", "--oversubscribe", "/usr/bin/python3.11 -u train.py"),
        ("-n 2 -- ./start.sh train.py", "-n 2", "./start.sh train.py"),
        ("-n 4 ./start.sh", "-n 4 ./start.sh", ""),
    ],
)
def test_where_the_program_begins(words, options, rest):
    assert mpirun.split(words.split()) == (options.split(), rest.split())


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("train.py -m x", f"{sys.executable} {RANK} train.py -m x"),
        ("-m train", f"{sys.executable} {RANK} -m train"),
        ("python3 -u -X dev train.py", f"python3 -u -X dev {RANK} train.py"),
        ("python -m mpi4py train.py", f"python {RANK} train.py"),
        ("python -W error -m train", f"python -W error {RANK} -m train"),
        ("python -u - x.py", f"{sys.executable} {RANK} -- python -u - x.py"),
        ("./start.sh train.py", f"{sys.executable} {RANK} -- ./start.sh train.py"),
    ],
)
def test_commands_that_ranks_run(words, command):
    assert mpirun.program(words.split()) == command.split()


def test_settings_of_each_launcher(monkeypatch):
    assert line(OPEN_MPI, ["--with-ft", "no"], ["x"], ["V"]) == ["mpirun", "-x", "V", "--with-ft", "no", "x"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert settings(OPEN_MPI, [], {})["OMPI_MCA_coll"] == "^han"
    assert "OMPI_MCA_coll" not in settings(OPEN_MPI, [], {"OMPI_MCA_coll": "tuned"})
    assert "OMPI_MCA_coll" not in settings(OPEN_MPI, ["--mca", "coll", "tuned"], {})
    assert "OMPI_MCA_coll" not in settings(OPEN_MPI, ["--omca", "coll", "tuned"], {})
    assert settings(OPEN_MPI, ["--mca", "btl", "coll"], {}) == {"OMPI_MCA_coll": "^han"}
    assert settings(OLD, [], {}) == settings(MPICH, [], {}) == {}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert settings(OLD, [], {}) == root
    assert settings(MPICH, [], {}) == {}
    assert clean({"PMIX_RANK": "0", "HOME": "/root"}) == {"HOME": "/root"}


# --- hosts, cores, GPUs -----------------------------------------------------------------------------------------------


def test_hosts_by_name_and_from_a_file(tmp_path):
    assert mpirun.named_hosts("a:2,b,a:1") == [Host("a", 3), Host("b", 1)]
    file = tmp_path / "hosts"
    file.write_text("# ours\na slots=2 max_slots=4\nb:2  # MPICH's\n\nc\nc\nd max_slots=4\n")
    assert mpirun.listed_hosts(file) == [Host("a", 2), Host("b", 2), Host("c", 2), Host("d", 1)]
    assert mpirun.listed_hosts(file, each=4) == [Host("a", 2), Host("b", 2), Host("c", 2), Host("d", 4)]
    assert mpirun.named_hosts("a,b:1", each=4) == [Host("a", 4), Host("b", 1)]
    for wrong in ("a:0", "a:x", "a b", ""):
        with pytest.raises(ValueError, match="is not a host with its number of ranks"):
            mpirun.named_hosts(wrong)
    file.write_text("a slots=2\na slots=two\n")
    with pytest.raises(ValueError, match="line 2 of"):
        mpirun.listed_hosts(file)
    file.write_text("# nobody\n")
    with pytest.raises(ValueError, match="names no hosts"):
        mpirun.listed_hosts(file)


def test_hosts_on_which_nothing_starts_do_not_answer(tmp_path):
    path = tmp_path / "mpirun"
    path.write_text('#!/bin/sh\ncase "$*" in *bad:1*) exit 1;; esac\n')
    path.chmod(0o755)
    there = [Host("a", 2), Host("bad", 2), Host("c", 1)]
    assert mpirun.answering(Implementation(str(path), "Open MPI"), there, os.environ) == [there[0], there[2]]


FREE = "--bind-to none"


@pytest.mark.parametrize(
    ("words", "environ", "placing", "cores", "note"),
    [
        ("", {}, f"-n 4 --oversubscribe {FREE}", "bind 4", "starting 4 ranks, one per core"),
        ("-n 5", {}, f"-n 5 --oversubscribe {FREE}", "bind 5", "5 ranks on 4 cores: the cores are oversubscribed"),
        ("--hosts a:2,b:2", {}, f"-n 4 --host a:2,b:2 {FREE}", "bind 4", "one per slot of the hosts"),
        ("-n 9 --hosts a:2,b:2 --oversubscribe", {}, f"-n 9 --host a:2,b:2 --oversubscribe {FREE}", "bind 9", ""),
        ("", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, f"-n 8 {FREE}", "bind 8", "one per task of the Slurm job"),
        ("--gpus-per-host 3 --hosts a,b", {}, f"-n 6 --host a:3,b:3 {FREE}", "bind 6", "one per GPU"),
        ("--gpus-per-host 4", {"SLURM_JOB_NUM_NODES": "2"}, f"-n 8 --oversubscribe {FREE}", "bind 8", "one per GPU"),
        ("-n 2 --map-by ppr:2:node --oversubscribe", {}, "-n 2 --oversubscribe --map-by ppr:2:node", None, ""),
        ("-n 8 --bind-to none", {}, "-n 8 --oversubscribe --bind-to none", "share 8", ""),
        ("-n 2", {"PRTE_MCA_hwloc_default_binding_policy": "none"}, "-n 2", None, ""),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("four_cores")
def test_mpirun_binds_nothing_unless_the_user_says_so(words, environ, placing, cores, note, launcher, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    done = adaptive_run("--show", "--mpirun", launcher("five"), *words.split(), "-m", "x")
    assert note in done.stderr if note else not done.stderr
    said = shlex.split(done.stdout)
    assert f" {placing} {sys.executable}" in " ".join(said)
    assert (f"ADAPTIVE_CORES={cores}" in said) is (cores is not None)
    assert ("ADAPTIVE_CORES" in said) is (cores is not None)  # -x


CORES_OF_FOUR = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("local", "ranks", "given", "bound", "threads"),
    [
        (0, 4, {}, {0, 4}, "1"),
        (0, 1, {}, set(range(8)), None),
        (5, 8, {}, None, "1"),
        (0, 1, {"quota": 1.5}, None, "2"),
        (1, 2, {"quota": 4.0}, {2, 6, 3, 7}, "2"),  # it is no limit
        (1, 2, {"how": "share 2"}, None, "2"),
        (0, 1, {"spawned": True, "how": "bind 2"}, None, "2"),
        (1, 2, {"how": ""}, None, None),
        (None, 2, {}, None, None),
        (1, 2, {"NPROC": "3"}, {2, 6, 3, 7}, None),
    ],
)
def test_ranks_divide_the_cores_of_their_host(local, ranks, given, bound, threads, monkeypatch):
    given = {"how": f"bind {ranks}", "spawned": False, "quota": None, **given}
    found: list[set[int]] = []
    monkeypatch.setattr("launchers.resources.cores", lambda: CORES_OF_FOUR)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: found.append(set(cpus)), raising=False)
    environ = {"ADAPTIVE_CORES": given["how"], **{name: given[name] for name in ("NPROC",) if name in given}}
    environ |= {} if local is None else {"MPI_LOCALRANKID": str(local)}
    environ |= {"MPI_LOCALNRANKS": str(ranks)} | ({"ADAPTIVE_SPAWNED": "1"} if given["spawned"] else {})
    take_cores(environ, given["quota"])
    assert found == ([] if bound is None else [bound])
    assert environ.get("PJRT_NPROC") == threads


def test_the_hardware_threads_of_a_core_are_together(tmp_path, monkeypatch):
    for cpu, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (0, 0), (1, 0), (0, 1)]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        for name, value in (("physical_package_id", package), ("die_id", 0), ("core_id", core)):
            (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 5}, raising=False)
    assert cores(tmp_path) == [[0, 3], [2, 5], [1]]
    assert cores(tmp_path / "none") == [[0], [1], [2], [3], [5]]


def test_a_containers_share_of_the_cores(tmp_path):
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("there", "given", "local", "ranks", "seen", "memory"),
    [
        (3, {}, 1, 3, "1", None),
        (2, {}, 1, 1, None, None),  # the only rank of its host has all of them
        (0, {}, 1, 2, None, None),
        (2, {}, 2, 3, "0", "0.45"),  # two share the first
        (1, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 1, 2, "0", None),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-7,GPU-3"}, 1, 2, "GPU-3", None),
        (2, {"CUDA_VISIBLE_DEVICES": "-1"}, 1, 2, "-1", None),  # none of them
        (2, {"OMPI_COMM_WORLD_LOCAL_RANK": ""}, 1, 2, None, None),
        (2, {"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, 1, 2, None, None),  # it may be the only one
    ],
)
def test_by_default_each_of_several_ranks_sees_one_gpu(there, given, local, ranks, seen, memory, monkeypatch):
    monkeypatch.setattr("launchers.resources.gpus_here", lambda: there)
    environ = {"OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), **given}
    see_own_gpus(environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == seen
    assert environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == memory


def test_the_gpus_of_a_host_are_counted_by_their_device_files(tmp_path, monkeypatch):
    """A container may have any of its machine's GPUs; CUDA numbers those from 0."""
    for name in ("nvidia4", "nvidia6", "nvidia7_old", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr("launchers.resources.Path", {"/dev": tmp_path}.__getitem__)
    for local, seen in ((0, "0"), (1, "1"), (2, "0")):
        see_own_gpus(environ := {"OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": "3"})
        assert environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("given", "local", "ranks", "seen"),
    [
        ({GPUS: "8"}, "1", "2", "4,5,6,7"),
        ({GPUS: "2"}, "1", "", "1"),
        ({GPUS: "2", "CUDA_VISIBLE_DEVICES": "3,GPU-7"}, "1", "", "GPU-7"),
        ({GPUS: "0"}, "1", "2", None),
        ({GPUS: "2"}, "2", "", "no GPU for rank 2"),
        ({GPUS: "2"}, "", "", "does not say which rank"),
    ],
)
def test_each_rank_sees_its_part_of_so_many_gpus(given, local, ranks, seen):
    environ = {**given, "OMPI_COMM_WORLD_LOCAL_RANK": local, "OMPI_COMM_WORLD_LOCAL_SIZE": ranks}
    if " " in (seen or ""):
        with pytest.raises(SystemExit, match=seen):
            see_own_gpus(environ)
    else:
        see_own_gpus(environ)
        assert environ.get("CUDA_VISIBLE_DEVICES") == seen


# --- a program in a rank ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(256 + 3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_program_runs_in_a_rank_as_in_python(module, ends, code, said, tmp_path, monkeypatch, capsys):
    file = tmp_path / "trains.py"
    file.write_text(f"import sys\nprint(__name__, *sys.argv, repr(sys.path[0]))\n{ends}\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert run_in_rank(["-m", "trains", "-a"] if module else ["trains.py", "-a"], sys.stderr.write) == code
    printed = capsys.readouterr()
    name, folder = (file, "") if module else ("trains.py", str(tmp_path))
    assert printed.out == f"__main__ {name} -a {folder!r}\n"
    assert printed.err.endswith(f"{said}\n" if said else "")
    if ends == "1 / 0":  # only the program's own frames are shown
        assert printed.err.count("File ") == 1
        assert 'trains.py", line 3, in <module>' in printed.err


# --- as a command -----------------------------------------------------------------------------------------------------

SAYS = {
    "five": "mpirun (Open MPI) 5.0.11\n\nReport bugs to",
    "four": "mpirun (Open MPI) 4.1.4",
    "hydra": "HYDRA build details:\n    Version:                                 4.2.3\n    Release Date: ",
    "strange": "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005",
}


@pytest.fixture
def launcher(tmp_path):
    """Create a launcher that prints its version, or its arguments and environment."""

    def make(name: str) -> str:
        path = tmp_path / name
        path.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{SAYS[name]}"; exit; fi\necho "$*"; exit ${{CODE:-0}}\n'
        )
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(running, "usable", lambda *_: 4)
    theirs = ("SLURM_", "PRTE_MCA_", "OMPI_MCA_")
    for name in [*THREADS, *(name for name in os.environ if name.startswith(theirs))]:
        monkeypatch.delenv(name, raising=False)


def adaptive_run(*words):
    return CliRunner().invoke(running.run, words)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("five", "--with-ft ulfm -x ADAPTIVE_LAUNCHER -x ADAPTIVE_CORES -n 2 --oversubscribe --bind-to none"),
        ("four", "-x ADAPTIVE_LAUNCHER -x ADAPTIVE_CORES -n 2 --oversubscribe --bind-to none"),
        ("hydra", "-n 2"),
        ("strange", "-n 2"),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_the_line_for_each_mpi_is_shown_and_not_run(launcher, name, said):
    path = launcher(name)
    done = adaptive_run("--show", "--mpirun", path, "-n", "2", "-m", "train", "-n", "9")
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout)
    assert "ADAPTIVE_CORES=bind 2" in words[: words.index(path)]
    assert words[words.index(path) + 1 :] == [*said.split(), sys.executable, str(RANK), "-m", "train", "-n", "9"]


@pytest.mark.usefixtures("four_cores")
def test_hosts_are_given_in_each_launchers_syntax(launcher, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    where = ("--hostfile", str(tmp_path / "hosts"))
    assert "-n 4 --host a:2,b:2 --bind" in adaptive_run("--show", "--mpirun", launcher("five"), *where, "x.py").stdout
    done = adaptive_run("--show", "--mpirun", launcher("five"), "--hosts", "a,b", "--gpus-per-host", "2", "x.py")
    assert "-n 4 --host a:2,b:2 --bind" in done.stdout
    assert "-n 4 -hosts a:2,b:2 /" in adaptive_run("--show", "--mpirun", launcher("hydra"), *where, "x.py").stdout
    done = adaptive_run("--show", "--mpirun", launcher("strange"), *where, "x.py")
    assert (done.exit_code, "for hosts is unknown" in done.stderr) == (2, True)


@pytest.mark.usefixtures("four_cores")
def test_unknown_options_are_passed_to_the_launcher(launcher, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    words = shlex.split("--n=2 --mca btl tcp,self -x A -H a,b -genv B 1 --bind-to none --grace 3 x.py --show")
    said = shlex.split(adaptive_run("--mpirun", launcher("five"), "--show", *words).stdout)
    assert said[-2:] == ["x.py", "--show"]
    text = " ".join(said)
    assert "-n 2 --host a:1,b:1 --mca btl tcp,self -x A -genv B 1 --bind-to none" in text
    assert "--grace" not in text
    assert "-x JAX_PLATFORMS" in text  # ranks on other hosts would not have it


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("-n 2 ./start.sh", "no program given"),
        ("--hosts a:0 x.py", "not a host with its number of ranks"),
        ("--hostfile nowhere x.py", "nowhere"),
        ("-n 2 no/such.py", "there is no no/such.py in "),
        ("--mpirun /no/mpirun x.py", "/no/mpirun cannot be run"),
    ],
)
def test_mistakes_are_named(words, complaint, monkeypatch, launcher):
    monkeypatch.chdir(ROOT)
    given = words.split()
    done = adaptive_run(*([] if "--mpirun" in words else ["--mpirun", launcher("five")]), *given)
    assert done.exit_code == 2
    assert complaint in " ".join(done.stderr.split())


@pytest.mark.parametrize("options", ["--hosts a", "--wdir /there"])
def test_a_script_is_not_looked_for_where_ranks_do_not_run_it(options, launcher):
    done = adaptive_run("--mpirun", launcher("five"), "--show", "-n", "1", *options.split(), "no/such.py")
    assert done.exit_code == 0, done.output


def test_help():
    for words in (["--help"], ["-n", "2", "-h"], []):
        assert "[OPTIONS OF MPIRUN] PROGRAM" in adaptive_run(*words).stdout


def test_the_line_is_printed_and_the_code_passed_on(launcher):
    done = subprocess.run(
        [sys.executable, "-m", "launchers.run", "--mpirun", launcher("four"), "-n", "3", "--", "true"],
        env={**os.environ, "CODE": "7"}, cwd=ROOT, capture_output=True, text=True, timeout=limit(60),
    )  # fmt: skip
    assert (done.returncode, done.stdout.endswith(" true\n")) == (7, True)
    assert any(line.startswith("+ env ") and line.endswith(" true") for line in done.stderr.splitlines())


@pytest.mark.ranks
def test_ranks_have_cores_threads_and_a_gpu_of_their_own():
    """As the MPI that is installed here understands it."""
    names = ("PJRT_NPROC", "CUDA_VISIBLE_DEVICES")
    says = f"import os; print(sorted(os.sched_getaffinity(0)), *map(os.environ.get, {names}))"
    theirs = ("PRTE_MCA_", "OMPI_", "SLURM_", "PMIX_", *THREADS, "CUDA_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    options = ["-n", "2", "--gpus-per-host", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "launchers.run", *options, "--", sys.executable, "-c", says],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=limit(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = sorted(line.rsplit(" ", 2) for line in done.stdout.splitlines())
    assert {gpu for _, _, gpu in found} == {"0", "1"}
    here = usable(cores(), cpu_quota())
    assert {threads for _, threads, _ in found} == {str(max(1, here // 2))}
    if here == len(cores()) > 1:
        (first, *_), (second, *_) = found
        assert not set(json.loads(first)) & set(json.loads(second))


def test_the_launcher_is_that_of_the_library_or_beside_python_or_on_path(launcher, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("bin", "beside", "path")]
    for folder, name, there in zip(folders, ("hydra", "five", "four"), ("mpiexec", "mpirun", "mpirun"), strict=True):
        folder.mkdir()
        Path(launcher(name)).rename(folder / there)
    library = {"MPI4PY_LIBMPI": str(tmp_path / "lib" / "libmpi.so")}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/bin:/usr/bin")
    assert find(library) == Implementation(str(tmp_path / "bin" / "mpiexec"), "MPICH", (4, 2, 3))
    assert find({"MPI4PY_LIBMPI": "libmpi.so"}).path == str(tmp_path / "beside" / "mpirun")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find({}) == Implementation(str(tmp_path / "path" / "mpirun"), "Open MPI", (4, 1, 4))
    (tmp_path / "path" / "mpirun").rename(tmp_path / "path" / "mpiexec")
    assert find({}).path == str(tmp_path / "path" / "mpiexec")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no mpirun found beside"):
        find({})
