"""When the batch file for Slurm has its job queued again: run by bash, with an `adaptive` and an `scontrol` of ours."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.speed import limit

BATCH = Path(__file__).parents[1] / "examples" / "slurm_requeue.sbatch"
# Prints a line; ends at once with CODE, or after SIGTERM with 143 or the code in CODE_AFTER_TERM.
ADAPTIVE = """#!/bin/bash
trap 'echo signaled; [ "$TWICE" ] && { read -r _ < "$TWICE"; }; exit ${CODE_AFTER_TERM:-143}' TERM
echo "$@"
[ "$CODE" ] && exit "$CODE"
while :; do sleep 0.02; done
"""


@pytest.fixture
def environment(tmp_path):
    for name, script in {"adaptive": ADAPTIVE, "scontrol": '#!/bin/bash\necho scontrol "$@"\n'}.items():
        path = tmp_path / name
        path.write_text(script)
        path.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}


def start(environment):
    command = ["bash", str(BATCH), "train.py", "--epochs", "3"]
    batch = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert batch.stdout is not None
    assert batch.stdout.readline() == "run --grace 100 --restarts 3 train.py --epochs 3\n"
    return batch


def end(batch) -> tuple[int, str]:
    try:
        said = batch.communicate(timeout=limit(60))[0]
    finally:
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)
    return batch.returncode, said


@pytest.mark.parametrize("code", [0, 143])
def test_a_job_that_ends_by_itself_is_not_queued_again(environment, code):
    """It ends with 143 without a signal to this shell, so a person has ended its ranks."""
    assert end(start({**environment, "CODE": str(code)})) == (code, "")


@pytest.mark.parametrize(
    ("number", "code", "requeued"),
    [(signal.SIGUSR1, 143, True), (signal.SIGUSR1, 0, False), (signal.SIGUSR1, 1, False), (signal.SIGTERM, 143, False)],
    ids=["out of time", "complete", "fails", "canceled"],
)
def test_a_job_is_requeued_if_it_is_out_of_time(environment, number, code, requeued):
    batch = start({**environment, "CODE_AFTER_TERM": str(code)})
    batch.send_signal(number)
    assert end(batch) == (code, "signaled\n" + "scontrol requeue 4711\n" * requeued)


def test_signals_that_follow_do_not_reach_the_job_while_it_keeps_its_state(environment, tmp_path):
    """Slurm sends SIGTERM, too, when the time is over; and the launcher would end at once."""
    fifo = tmp_path / "go on"
    os.mkfifo(fifo)
    batch = start({**environment, "TWICE": str(fifo)})
    batch.send_signal(signal.SIGUSR1)
    assert batch.stdout.readline() == "signaled\n"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        batch.send_signal(number)
    fifo.write_text("now\n")
    assert end(batch) == (143, "scontrol requeue 4711\n")


def test_the_batch_files_slurm_options():
    asked = [line.removeprefix("#SBATCH ") for line in BATCH.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append"} <= set(asked)
