"""The helper that starts MPI programs: what it promises to the tests that rely on it."""

from __future__ import annotations

import psutil
import pytest

from tests import mpirun
from tests.mpirun import Result, run


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import sys, time\n"
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "if 'fail' in sys.argv and comm.rank == 1:\n"
        "    raise ValueError('rank 1 has had enough')\n"
        "if 'hang' in sys.argv:\n"
        "    print('here', flush=True)\n"
        "    time.sleep(1000)\n"
        "print(f'{comm.allreduce(comm.rank)} of {comm.size}', flush=True)\n"
    )
    return path


def test_all_ranks_run_and_are_heard_and_a_success_fails_the_test_where_a_failure_is_expected(script):
    with pytest.raises(pytest.fail.Exception, match="were to fail: exit status 0") as caught:
        run(script, n=3, expect_failure=True)
    assert str(caught.value).count("3 of 3") == 3  # lines of several ranks may run into one another


def test_a_failure_of_one_rank_fails_the_test(script):
    with pytest.raises(pytest.fail.Exception, match="rank 1 has had enough"):
        run([script, "fail"])


@pytest.mark.parametrize(("failures", "expect_failure"), [(2, False), (3, False), (3, True)])
def test_a_launcher_that_did_not_start_is_tried_again(script, monkeypatch, failures, expect_failure):
    """It has run nothing, so it is neither a success nor the failure that a test expects."""
    not_started = Result(213, "", "The PMIx server's listener thread failed to start. We cannot\ncontinue.", 0.0)
    outcomes = [not_started] * failures + [Result(0, "fine", "", 1.0)]
    monkeypatch.setattr(mpirun, "_run", lambda *_: outcomes.pop(0))
    if failures < 3:
        assert run(script, expect_failure=expect_failure).stdout == "fine"
    else:
        with pytest.raises(pytest.fail.Exception, match="listener thread"):
            run(script, expect_failure=expect_failure)
        assert len(outcomes) == 1


def test_a_job_that_hangs_fails_the_test_and_leaves_no_process(script):
    with pytest.raises(pytest.fail.Exception, match="no end after "):
        run([script, "hang"], timeout=1, expect_failure=True)
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(script) in line]
