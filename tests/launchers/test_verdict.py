"""What follows from how the processes of a job have ended."""

from __future__ import annotations

import pytest

from launchers.verdict import ProcessState, reason_to_end, remark, verdict


def process(rank: int = 0, **known) -> ProcessState:
    return ProcessState("job", rank, 3, "here", 1, **{"connected": False, **known})


@pytest.mark.parametrize(
    ("processes", "own", "code"),
    [
        ([process(ended=0), process(ended=0)], 0, 0),
        ([process(ended=0), process()], 0, 1),  # after it
        ([process(ended=0), process(killed=9)], 139, 137),
        ([process(ended=0), process()], 139, 139),  # by what, nobody knows
        ([process(worlds=1, killed=9), process(worlds=1, killed=11)], 0, 139),
        ([process(ended=1, heard=True), process(ended=3), process(ended=4)], 0, 3),
        ([process(killed=9), process(ended=1)], 0, 137),  # the first of them
        ([process(ended=1, heard=True), process(killed=9)], 0, 137),
        ([process(ended=0), process(left=True, ended=None)], 0, 0),
        ([process(ended=0), process(spawned=True, ended=3), process(spawned=True, killed=9)], 139, 0),
        ([process(ended=0), process(worlds=1, cut_short=True)], 0, 1),
        ([process(left=True)], 5, 5),
        ([], 7, 7),
        ([], 0, 0),
    ],
)
def test_whether_a_job_ended_well(processes, own, code):
    assert verdict(processes, own) == code


def alive(rank: int, **known) -> ProcessState:
    return process(rank, connected=True, **known)


def alone() -> ProcessState:
    return ProcessState("alone", 0, 1, "here", 1, ended=0)


def spawned(rank: int = 0, **known) -> ProcessState:
    how = {"connected": False, "ended": 0, "joined": True, **known}
    return ProcessState("another", rank, 2, "here", 1, spawned=True, **how)


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ([alive(0), alive(1)], None),
        ([process(0, ended=0), process(1, ended=0), process(2, ended=0)], ""),
        ([process(0, ended=0), process(1, ended=0)], None),  # rank 2 is on its way, or never says anything
        ([alive(0, worlds=1), process(1, worlds=1, worked=True), alive(2)], None),
        ([alive(0), process(1, killed=9)], "rank 1 (pid 1 on here) was killed by SIGKILL before its first world, and"),
        ([alive(0, making=True), process(1, ended=0)], "rank 1 (pid 1 on here) ended with exit code 0 before its"),
        (
            [alive(0, making=True), process(1, killed=9, worked=True)],
            "rank 1 (pid 1 on here) was killed by SIGKILL after its last world, and rank 0 (pid 1 on here) waits for",
        ),
        ([alive(0, making=True), process(1, left=True, worked=True, worlds=0)], "rank 1 (pid 1 on here) died after"),
        ([process(1, killed=9), process(0, ended=1), alive(2)], "rank 1 (pid 1 on here) was killed by SIGKILL before"),
        ([process(0, ended=1, heard=True), process(1, killed=9)], "rank 1 (pid 1 on here) was killed by SIGKILL"),
        (  # all raise because of a loss that ends the job, or all members are lost and the reserve raises
            [process(1, worlds=1, worked=True, killed=9), process(0, ended=1, heard=True), alive(2)],
            "rank 1 (pid 1 on here) was killed by SIGKILL in a world; the others ended by an error.",
        ),
        (
            [process(n, worlds=1, worked=True, killed=9 + 2 * (n == 2)) for n in (2, 0, 1)],
            "no rank is left: rank 2 (pid 1 on here) was killed by SIGSEGV in a world; rank 0 (pid 1 on here) was ",
        ),
        ([process(0, ended=0), *(process(n, worlds=1, worked=True, killed=9) for n in (1, 2))], ""),
        ([process(n, ended=0, left=True) for n in range(3)], ""),
        ([alive(0), process(1, ended=3)], "rank 1 (pid 1 on here) ended with exit code 3."),
        (  # the making of a world has failed
            [process(2, ended=0), process(1, ended=1), alive(0)],
            "rank 1 (pid 1 on here) ended with exit code 1. Before that, rank 2 (pid 1 on here) ended with",
        ),
        ([alive(0), process(1, ended=3, left=True)], None),
        ([alive(0), process(1, ended=1, heard=True), alive(2)], ""),
        ([alive(0), process(0, spawned=True, ended=3), process(0, spawned=True, killed=9)], None),
        ([alone(), spawned()], None),  # its second process is on its way
        ([alone(), spawned(), spawned(1, joined=False)], ""),  # the second need not join
        ([alone(), spawned(joined=False)], ""),
        ([alone(), spawned(joined=False, connected=True, ended=None)], ""),  # it is not waited for
        ([spawned(connected=True, ended=None, making=True), process(1, ended=0)], None),  # it waits for its own job
    ],
)  # fmt: skip
def test_whether_a_job_has_to_be_ended(processes, reason):
    found = reason_to_end(processes)
    assert found == reason if not reason else found is not None and found.startswith(reason)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (process(0, worlds=1, worked=True, killed=9), ""),  # the others say so
        (process(0, killed=9), ""),  # it is the reason for the end
        (process(0, worked=True, killed=70), "was killed by signal 70 after its last world; the others continue, and"),
        (process(0, spawned=True, killed=9), "of a spawned job (pid 1 on here) was killed by SIGKILL before it joined"),
        (process(0, spawned=True, killed=9, cut_short=True), ""),  # the launcher has ended it
        (process(0, spawned=True, ended=0), ""),
    ],
)
def test_how_a_lost_process_is_described_while_the_job_continues(one, said):
    assert said in remark(one) if said else not remark(one)
