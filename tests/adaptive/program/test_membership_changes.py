"""Between two steps: who leaves is reported, who joins continues from the state of the others or from a copy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaptive.control.membership import Leaver
from adaptive.program import membership_changes
from adaptive.program.membership_changes import AllLeave, MembershipChanges, RunOver
from adaptive.program.parts import RunLimit, RunProgress
from adaptive.program.tracing import Traced

OWN = RunProgress(3, RunLimit(), False, "own")
THEIRS = (8, tuple(RunLimit()), True, "theirs", ("trace.json", 9, 7))
TAKEN = RunProgress(8, RunLimit(), True, "theirs", Traced("trace.json", 9, 7))


class Process:
    """A process in a run: its world, and the parts of its program, which note what is called."""

    def __init__(self, **how):
        self.calls, self.notes = [], []
        self.in_reserve = self.needs_state_transfer = self.due = self.changed = self.all_leave = self.active = False
        self.run_under_way, self.known_before_take_over, self.received, self.why_all_leave = True, None, None, ""
        self.leavers, self.joined, self.waits, self.restored = [], [], 1, False
        vars(self).update(how)
        self.copies = self.clock = self.members = self.membership = self.update = self.hooks = self
        self.world = self.run = self
        self.kernels = self.engine = SimpleNamespace(can_join=None)
        self.engine.kernels, self.name, self.sizes = self.kernels, "program", ()

    def __getattr__(self, name):
        if name not in ("together", "catch_up", "count_losses", "forget", "restart"):
            raise AttributeError(name)
        return lambda *given: self.calls.append((name, *map(repr, given)))

    def why_no_copies(self):
        return ""

    create_copies = hold_copies = why_no_copies

    def change(self, about):
        self.calls.append(("change",))
        return self.leavers

    def gone(self, slots):
        self.calls.append(("gone", *slots))

    def wait(self, can_join):
        self.waits -= 1
        self.in_reserve = self.waits > 0

    def load(self):
        return THEIRS

    def transfer_state(self, make, buffers, about):
        return self.received

    def refresh(self):
        return self.joined

    def places(self, slots):
        return [10 * slot for slot in slots]

    def note(self, text):
        self.notes.append(text)

    def hand_over(self, joined, name):
        return [f"handed over to {joined}"]


@pytest.fixture(autouse=True)
def unpacked(monkeypatch):
    monkeypatch.setattr(membership_changes, "unpack", lambda parts, received: received)


def called(process):
    return [name for name, *_ in process.calls]


@pytest.mark.parametrize("what", ["due", "in_reserve", "needs_state_transfer", "changed", None])
def test_steps_go_on_without_a_call_as_long_as_nothing_changes(what):
    process = Process(**({what: True} if what else {}))
    assert MembershipChanges(process).settled == (what is None)


def test_where_nothing_is_due_nothing_changes():
    process = Process()
    assert MembershipChanges(process).apply(OWN) is OWN
    assert process.calls == []
    waiting = Process(due=True, in_reserve=True, needs_state_transfer=True, received=THEIRS)
    MembershipChanges(waiting).apply(OWN)
    assert "change" not in called(waiting), "a process in reserve takes no part in changes"


def test_a_process_of_the_reserve_takes_the_progress_of_the_others_when_it_joins():
    process = Process(in_reserve=True, needs_state_transfer=True, received=THEIRS, waits=3)
    assert MembershipChanges(process).apply(OWN) == TAKEN
    assert process.waits == 0
    assert called(process) == ["restart", "catch_up"]
    sending = Process(needs_state_transfer=True)
    assert MembershipChanges(sending).apply(OWN) is OWN
    assert called(sending) == ["catch_up"]


def test_when_the_run_is_over_the_reserve_has_the_final_state():
    process = Process(in_reserve=True, needs_state_transfer=True, received=THEIRS, run_under_way=False)
    with pytest.raises(RunOver) as over:
        MembershipChanges(process).apply(OWN)
    assert over.value.progress == TAKEN


@pytest.mark.parametrize("known", [None, 0, 2])
def test_the_reserve_continues_from_its_copy_if_all_members_are_lost(known):
    process = Process(in_reserve=True, known_before_take_over=known)
    progress = MembershipChanges(process).apply(OWN)
    if known is None:
        assert (progress, process.restored, process.notes) == (OWN, False, [])
        return
    assert (progress, process.restored) == (TAKEN, True)
    assert ("count_losses", str(known)) in process.calls
    (note,) = process.notes
    assert note.endswith("continue from the copy in memory after step 8.")


def test_who_leaves_is_reported_with_the_reason():
    leavers = [Leaver((1,), "SIGTERM", "pid 1"), Leaver((2, 3), "", "pid 2"), Leaver((4,), "SIGUSR1", "pid 4")]
    process = Process(due=True, leavers=leavers)
    MembershipChanges(process).apply(OWN)
    assert called(process) == ["together", "change", "gone"]
    assert process.calls[-1] == ("gone", 1, 2, 3, 4)
    assert process.notes == [
        "left after step 3, upon a termination signal: worker 1 (SIGTERM to pid 1), worker 4 (SIGUSR1 to pid 4).",
        "left after step 3, dismissed by a hook: workers 2, 3 (pid 2).",
    ]
    alone = Process(due=True, leavers=leavers[1:2])
    MembershipChanges(alone).apply(OWN)
    assert len(alone.notes) == 1


def test_the_run_ends_if_all_leave():
    leavers = [Leaver((k,), signal, "pid") for k, signal in enumerate(("SIGUSR1", "SIGTERM", "SIGUSR1", ""))]
    process = Process(due=True, leavers=leavers, all_leave=True, why_all_leave="all received one")
    with pytest.raises(AllLeave, match=r"all received one \(SIGTERM and SIGUSR1\)"):
        MembershipChanges(process).apply(OWN)
    assert (process.notes, called(process)) == ([], ["together", "change"])


@pytest.mark.parametrize("active", [False, True])
def test_what_is_known_of_workers_that_joined_is_forgotten(active):
    process = Process(changed=True, joined=[1, 2], active=active)
    MembershipChanges(process).apply(OWN)
    assert process.calls == [("forget", "[10, 20]")]
    assert process.notes == ["handed over to [1, 2]"] * active
