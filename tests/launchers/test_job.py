"""How a job ends if one of its ranks does: exit code, and the rank that is named. Without MPI."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpirun import ROOT
from tests.speed import limit

HERE = Path(__file__).parent
WITH_SHORT_DEADLINES = """
import sys
from launchers import job, run
job.AFTER_SECONDS = {after}
sys.exit(run.main())
"""


@pytest.fixture
def start(tmp_path):
    """Starts a job of ranks without MPI."""
    mpirun, folder = tmp_path / "mpirun", tmp_path / "meetings"
    mpirun.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.11"; exit; fi\n'
        f'exec {sys.executable} {HERE / "fake_mpirun.py"} "$@"\n'
    )
    mpirun.chmod(0o755)
    folder.mkdir()

    def begin(
        *words: str, n: int = 3, after: float = 0.3, script: str | None = None, grace: float = 30, **environ: str
    ):
        program = [str(HERE / "rank_without_mpi.py"), str(folder), *words] if script is None else ["--", script, *words]
        options = ["--mpirun", str(mpirun), "-n", str(n), "--grace", str(grace)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "SLURM_"))}
        return subprocess.Popen(
            [sys.executable, "-c", WITH_SHORT_DEADLINES.format(after=after), *options, "--begin", *program],
            env={**inherited, "PYTHONPATH": str(ROOT), **environ},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    return begin


@pytest.fixture
def end(start):
    """Run a job; return its exit code, the ranks' output, and the launcher's."""

    def run(*words: str, n: int = 3, **given):
        with start(*words, n=n, **given) as job:
            try:
                stdout, stderr = job.communicate(timeout=limit(100))
            finally:
                job.kill()
        said = [line for line in stderr.splitlines() if line.startswith("adaptive run: ")]
        return job.returncode, stdout.count("ended well"), "\n".join(line for line in said if "cores" not in line)

    return run


long = pytest.mark.long
NEEDED = "before its first world, and the others cannot continue without it."
MISSING = "and rank . .* waits for it in comm.world"
AFTER = "after its last world; the others continue, and the job ends with"
EXITS_1, EXITS_3 = "rank 2 .* ended with exit code 1", "rank 2 .* ended with exit code 3"
EXITS_BEFORE = f"rank 2 .* ended with exit code 0 before its first world, {MISSING}"
EXITS_BETWEEN = f"rank 2 .* ended with exit code 0 after its last world, {MISSING}"
KILLED_BEFORE = f"rank 2 .* was killed by SIGKILL {NEEDED}"
KILLED_BETWEEN = f"rank 2 .* was killed by SIGKILL after its last world, {MISSING}"


@pytest.mark.parametrize(
    ("phase", "way", "code", "well", "said"),
    [
        ("none", "none", 0, 3, ""),
        ("import", "SIGKILL", 137, 0, KILLED_BEFORE),
        pytest.param("import", "SIGSEGV", 139, 0, f"rank 2 .* was killed by SIGSEGV {NEEDED}", marks=long),
        ("import", "os._exit(0)", 1, 0, EXITS_BEFORE),
        pytest.param("import", "os._exit(3)", 3, 0, EXITS_3, marks=long),
        pytest.param(
            "import",
            "sys.exit(0)",
            1,
            0,
            EXITS_BEFORE,
            marks=long,
        ),
        pytest.param("import", "sys.exit(3)", 3, 0, EXITS_3, marks=long),
        pytest.param("import", "raises", 1, 0, EXITS_1, marks=long),
        ("making", "SIGKILL", 137, 0, KILLED_BEFORE),
        pytest.param(
            "making",
            "os._exit(0)",
            1,
            0,
            EXITS_BEFORE,
            marks=long,
        ),
        pytest.param("making", "os._exit(3)", 3, 0, EXITS_3, marks=long),
        pytest.param("making", "raises", 1, 0, EXITS_1, marks=long),
        ("world", "SIGKILL", 0, 2, ""),
        pytest.param("world", "SIGSEGV", 0, 2, "", marks=long),
        pytest.param("world", "os._exit(0)", 0, 2, "", marks=long),
        ("world", "leaves", 0, 2, ""),
        ("world", "os._exit(3)", 3, 0, EXITS_3),
        pytest.param("world", "sys.exit(3)", 3, 0, EXITS_3, marks=long),
        pytest.param("world", "raises", 1, 0, EXITS_1, marks=long),
        ("after", "SIGKILL", 137, 2, f"rank 2 .* was killed by SIGKILL {AFTER} 137"),
        ("after", "os._exit(0)", 0, 2, ""),
        pytest.param("after", "os._exit(3)", 3, 2, EXITS_3, marks=long),
        pytest.param("after", "sys.exit(0)", 0, 2, "", marks=long),
        pytest.param("after", "raises", 1, 2, EXITS_1, marks=long),
        ("between", "SIGKILL", 137, 0, KILLED_BETWEEN),
        pytest.param(
            "between",
            "os._exit(0)",
            1,
            0,
            EXITS_BETWEEN,
            marks=long,
        ),
        pytest.param(
            "between",
            "sys.exit(0)",
            1,
            0,
            EXITS_BETWEEN,
            marks=long,
        ),
        pytest.param("between", "leaves", 1, 0, f"rank 2 .* after its last world, {MISSING}", marks=long),
        pytest.param(
            "making another",
            "SIGKILL",
            137,
            0,
            KILLED_BETWEEN,
            marks=long,
        ),
        ("exit", "SIGKILL", 137, 3, f"rank 2 .* was killed by SIGKILL {AFTER} 137"),
        pytest.param("exit", "os._exit(3)", 3, 3, EXITS_3, marks=long),
    ],
)
def test_where_and_how_a_rank_ends(phase, way, code, well, said, end):
    found = end(phase, way, after=0.3 if code else 5.0)
    assert found[0] == code, found
    # Ranks that depend on nobody any more have time to end, and most times they do.
    assert found[1] == well or (code and found[1] <= well), found
    assert re.search(said, found[2]) if said else not found[2], found


@pytest.mark.parametrize(
    ("phase", "way", "ends", "code"),
    [
        ("none", "none", "crashes", 0),
        pytest.param("none", "none", "hangs", 0, marks=long),
        pytest.param("none", "none", "5", 0, marks=long),
        pytest.param("world", "SIGKILL", "crashes", 0, marks=long),
        ("world", "SIGKILL", "hangs", 0),
        pytest.param("after", "SIGKILL", "crashes", 137, marks=long),
        pytest.param("after", "os._exit(3)", "crashes", 3, marks=long),
    ],
)
def test_how_mpirun_ends_decides_nothing(phase, way, ends, code, end):
    found = end(phase, way, FAKE_ENDS=ends)
    assert found[0] == code, found


@pytest.mark.parametrize(
    ("phase", "way", "ends", "said"),
    [
        ("import", "SIGKILL", "crashes", "was killed by SIGKILL before it joined; the others continue without it"),
        pytest.param("import", "raises", "", "ended with exit code 1 before it joined", marks=long),
        pytest.param("import", "os._exit(3)", "hangs", "ended with exit code 3 before it joined", marks=long),
        pytest.param("spawned", "SIGKILL", "", "was killed by SIGKILL before it joined", marks=long),
        ("spawned", "raises", "", "ended with exit code 1 before it joined"),
    ],
)
def test_a_spawned_process_decides_nothing_before_it_joins(phase, way, ends, said, end):
    code, well, output = end(phase, way, after=5.0, FAKE_SPAWNED="1", FAKE_ENDS=ends)
    assert (code, well) == (0, 2), output
    assert re.search(rf"rank 0 of a spawned job \(pid .*\) {said}", output), output


def test_a_spawned_process_that_never_ends_is_not_waited_for(end):
    """Rank 0, which has spawned it, may be gone, and with it all that it waits for."""
    code, well, output = end("none", "none", FAKE_SPAWNED="1")
    assert (code, well, output) == (0, 2, "")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("true", 0, ""),
        ("exit 3", 3, "rank . .* ended with exit code 3"),
        ("test $OMPI_COMM_WORLD_RANK = 0 || sleep 1000; kill -9 $$", 137, "rank 0 .* was killed by SIGKILL before"),
    ],
)
def test_how_a_command_ends(command, code, said, end):
    found = end("-c", command, script="sh", n=2)
    assert found[0] == code, found
    assert re.search(said, found[2]), found


def test_a_command_that_cannot_be_run(end):
    assert end(script="no-such-command", n=1)[0] == 127


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=long)])
def test_a_signal_while_ranks_import(number, start):
    """Each rank gets it, whether it had been started by then or not."""
    script = "echo there; test $OMPI_COMM_WORLD_RANK = 0 || sleep 1000; sleep 1000"
    with start("-c", script, script="sh", n=2) as job:
        try:
            assert job.stdout.readline() == "there\n"  # of one of them
            job.send_signal(number)
            job.communicate(timeout=limit(60))
        finally:
            job.kill()
    assert job.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=long)])
def test_a_signal_before_there_is_a_rank(number, start):
    """As soon as the launcher has printed the line that it runs."""
    with start("none", "none") as job:
        try:
            assert any("mpirun" in line for line in job.stderr)
            job.send_signal(number)
            job.communicate(timeout=limit(60))
        finally:
            job.kill()
    assert job.returncode == 128 + number


def test_a_second_signal_ends_the_job_at_once(start):
    """Although a rank ignores both, and has hours to end."""
    with start("-c", "trap '' TERM INT; echo there; sleep 1000", script="sh", n=1, grace=10_000) as job:
        try:
            assert job.stdout.readline() == "there\n"
            job.send_signal(signal.SIGTERM)
            job.send_signal(signal.SIGINT)  # two of one kind might arrive as one
            job.communicate(timeout=limit(60))
        finally:
            job.kill()
    assert job.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT)
