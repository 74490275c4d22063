"""Between two steps: who leaves is reported, who joins continues from the state of the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaptive.control.membership import Leaver
from adaptive.program.membership_changes import AllLeave, MembershipChanges, RunOver

THEIRS = "the state of the others"


class Process:
    """A process in a run: its world, and the parts of its program, which note what is called."""

    def __init__(self, **how):
        self.calls, self.notes = [], []
        self.in_reserve = self.needs_state_transfer = self.due = self.changed = self.all_leave = False
        self.run_under_way, self.received, self.why_all_leave = True, None, ""
        self.leavers, self.joined, self.waits, self.local_state = [], [], 1, frozenset()
        vars(self).update(how)
        self.clock = self.members = self.membership = self.update = self.hooks = self
        self.world = self.run = self
        self.plan = SimpleNamespace(has_local=bool(self.local_state))
        self.engine = SimpleNamespace(kernels=SimpleNamespace(can_join=None))
        self.name, self.sizes, self.step = "program", (), 3
        self.engine.workers = SimpleNamespace(receive_buffers=list)

    def __getattr__(self, name):
        if name not in ("catch_up", "forget", "restart"):
            raise AttributeError(name)
        return lambda *given: self.calls.append((name, *map(repr, given)))

    def change(self, about):
        self.calls.append(("change",))
        return self.leavers

    def wait(self, can_join):
        self.waits -= 1
        self.in_reserve = self.waits > 0

    def transfer_state(self, make, buffers, about):
        return self.received

    def refresh(self):
        return self.joined

    def places(self, slots):
        return [10 * slot for slot in slots]

    def note(self, text):
        self.notes.append(text)


@pytest.fixture(autouse=True)
def unpacked(monkeypatch):
    monkeypatch.setattr(MembershipChanges, "unpack", lambda self, received: self._parts.calls.append(("unpack",)))


def called(process):
    return [name for name, *_ in process.calls]


@pytest.mark.parametrize("what", ["due", "in_reserve", "needs_state_transfer", "changed", None])
def test_steps_go_on_without_a_call_as_long_as_nothing_changes(what):
    process = Process(**({what: True} if what else {}))
    assert MembershipChanges(process).settled == (what is None)


def test_where_nothing_is_due_nothing_changes():
    process = Process()
    MembershipChanges(process).apply()
    assert process.calls == []
    waiting = Process(due=True, in_reserve=True, needs_state_transfer=True, received=THEIRS)
    MembershipChanges(waiting).apply()
    assert "change" not in called(waiting), "a process in reserve takes no part in changes"


def test_a_process_of_the_reserve_takes_the_progress_of_the_others_when_it_joins():
    process = Process(in_reserve=True, needs_state_transfer=True, received=THEIRS, waits=3)
    MembershipChanges(process).apply()
    assert process.waits == 0
    assert called(process) == ["restart", "catch_up", "unpack"]
    sending = Process(needs_state_transfer=True)
    MembershipChanges(sending).apply()
    assert called(sending) == ["catch_up"]


def test_when_the_run_is_over_the_reserve_has_the_final_state():
    process = Process(in_reserve=True, needs_state_transfer=True, received=THEIRS, run_under_way=False)
    with pytest.raises(RunOver):
        MembershipChanges(process).apply()
    assert called(process) == ["restart", "catch_up", "unpack"]


def test_who_leaves_is_reported_with_the_reason():
    leavers = [Leaver((1,), "SIGTERM", "pid 1"), Leaver((4,), "SIGUSR1", "pid 4")]
    process = Process(due=True, leavers=leavers)
    MembershipChanges(process).apply()
    assert called(process) == ["change"]
    assert process.notes == [
        "left after step 3, upon a termination signal: worker 1 (SIGTERM to pid 1), worker 4 (SIGUSR1 to pid 4).",
    ]
    alone = Process(due=True, leavers=leavers[1:2])
    MembershipChanges(alone).apply()
    assert len(alone.notes) == 1


def test_the_run_ends_if_all_leave():
    leavers = [Leaver((k,), signal, "pid") for k, signal in enumerate(("SIGUSR1", "SIGTERM", "SIGUSR1", ""))]
    process = Process(due=True, leavers=leavers, all_leave=True, why_all_leave="all received one")
    with pytest.raises(AllLeave, match=r"all received one \(SIGTERM and SIGUSR1\)"):
        MembershipChanges(process).apply()
    assert (process.notes, called(process)) == ([], ["change"])


@pytest.mark.parametrize(
    ("joined", "local_state", "notes"),
    [
        ([1, 2], [0], ["workers 1, 2 joined, with the initial value of the state that is kept per worker."]),
        ([1], [0], ["worker 1 joined, with the initial value of the state that is kept per worker."]),
        ([1, 2], [], []),
        ([], [0], []),
    ],
)
def test_workers_that_joined_start_with_initial_state(joined, local_state, notes):
    process = Process(changed=True, joined=joined, local_state=frozenset(local_state))
    MembershipChanges(process).apply()
    assert process.calls == [("forget", str([10 * slot for slot in joined]))]
    assert process.notes == notes
