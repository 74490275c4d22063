"""Which process keeps which copies and continues which per-worker state; and worlds without copies."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.mailbox import LocalMailbox
from adaptive.program import copy_places
from adaptive.program.memory_copies import MemoryCopies, heirs, partners
from tests.speed import limit

COVERS = ("adaptive/program/copy_places.py",)


def test_the_partner_is_on_the_next_host():
    hosts = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert partners(hosts) == {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}
    assert partners({0: 0, 1: 0, 2: 7}) == {0: 2, 1: 2, 2: 0}


@pytest.mark.parametrize(
    ("joined", "orphans", "same_slot", "expected"),
    [
        ([2], [1], False, {1: 2}),
        ([2], [1], True, {}),
        ([1, 2], [2, 1], True, {1: 1, 2: 2}),
        ([3, 1], [0, 1], False, {1: 1, 0: 3}),
        ([3], [0, 1], False, {0: 3}),
        ([2, 3], [1], False, {1: 2}),
    ],
)
def test_who_continues_whose_state(joined, orphans, same_slot, expected):
    assert heirs(joined, orphans, same_slot=same_slot) == expected


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {}


def test_copies_in_memory_need_a_world_that_can_lose_processes():
    program = ad.Program(driver, jnp.zeros(()), {"x": np.arange(8, dtype=np.float32)}, global_batch=4)
    first, second = program.run(steps=2, checkpoint=ad.Checkpoints(memory=1))
    assert first.notes == ("memory=1 has no effect: this world cannot lose a process.",)
    assert second.notes == ()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"memory": 2}, "memory=2"),
        ({"memory": "yes"}, "memory='yes'"),
        ({"memory": 1, "memory_every": 0}, "memory_every=0"),
        ({"memory": 1, "memory_every": 1.5}, "memory_every=1.5"),
        ({}, "must be a path"),
    ],
)
def test_bad_options(options, what):
    with pytest.raises(ad.CheckpointError, match=what):
        ad.Checkpoints(**options)


# --- copies of a job --------------------------------------------------------------------------------------------------


class Memory(LocalMailbox):
    """Memory for copies, as one process sees it; `shared` holds the last two publications of each worker."""

    def __init__(self, shared, job, host):
        super().__init__()
        self.shared, self.job, self.hosts, self.host = shared, job, dict(job.hosts), host

    def is_mapped(self, worker):
        return self.hosts[worker] == self.host

    def publish(self, worker, round, vectors):
        if self.job.short_of_memory:
            raise OSError(28, "No space left on device")
        before = [kept for kept in self.shared.get(worker, []) if kept[0] != round]
        self.shared[worker] = [(round, [np.array(vector) for vector in vectors]), *before[:1]]

    def rounds(self, worker):
        assert self.is_mapped(worker)
        return [round for round, _ in self.shared.get(worker, [])]

    def copy_of(self, worker, round):
        assert self.is_mapped(worker)
        return dict(self.shared.get(worker, [])).get(round)

    def look(self, worker, reader, round):
        return dict(self.shared.get(worker, [])).get(round)


class Pulled:
    """Fetches copies of other hosts when the test calls `pull`."""

    def __init__(self, index, mailboxes, reader, wanted):
        self.index, self.mailboxes, self.wanted, self.held, self.closed = index, mailboxes, wanted, {}, False

    def pull(self):
        for slot, names in self.wanted().items():
            self.held[slot] = {name: dict(self.mailboxes[name].shared.get(slot, [])) for name in names}

    def serials(self, name, slot):
        return list(self.held.get(slot, {}).get(name, {}))

    def copy_of(self, name, slot, serial):
        return self.held[slot][name].get(serial)

    def latest(self, slot):
        found = self.index.look(slot, 0, 0)
        return None if found is None else int(found[0].view(np.int64)[0])

    def close(self):
        self.closed = True


class Workers:
    """The state of one process's only worker: it is `step` everywhere, and each worker's own part has its number."""

    def __init__(self, slot, *, has_local):
        self.has_local, self.present, self.some_present, self.adopted = has_local, [0], 0, None
        self.slot, self.step = slot, 0

    def views(self):
        return [np.full((2, 3), self.step, np.float32), np.array(self.step, np.int32)]

    def local_views(self, i):
        assert i == 0
        return [np.array([self.slot, self.step], np.int16)]

    def adopt_local(self, i, vectors):
        assert i == 0
        (self.adopted,) = (vector.view(np.int16).tolist() for vector in vectors)


class Process:
    """One process of the job: its world, its copies, and the rest of its program."""

    known_before_take_over = None

    def __init__(self, job, slot, *, has_local, one_data_set):
        self.job, self.slot, self.workers, self.created, self.holder = job, slot, range(slot, slot + 1), 0, None
        self.state = Workers(slot, has_local=has_local)
        self.copies = MemoryCopies(self, self.state, one_data_set=one_data_set)
        members = SimpleNamespace(export=lambda: (dict.fromkeys(job.members, 0), [], [], 0))
        other = SimpleNamespace(export=lambda: job.small, catch_up=lambda sizes: None)
        self.parts = SimpleNamespace(
            **dict.fromkeys(("sizes", "membership", "digest", "hooks"), other),
            members=members,
            copies=self.copies,
            world=self,
            skipped=SimpleNamespace(in_a_row=0),
            stream=SimpleNamespace(cursors=(0,), place=lambda: ""),
        )

    def __getattr__(self, name):  # members, losses and generation are the job's
        return getattr(self.job, name)

    @property
    def rank(self):
        return self.members.index(self.slot) if self.slot in self.members else len(self.members)

    @property
    def in_reserve(self):
        return self.job.under_way and self.slot not in self.members

    def why_no_copies(self):
        return self.job.why

    def create_copies(self, nbytes, about=""):
        shared = self.job.memories.setdefault(self.created, {})
        self.created += 1
        return Memory(shared, self.job, self.hosts[self.slot])

    def hold_copies(self, holder):
        self.holder = holder

    def all_gather_bytes(self, value, about=""):
        return self.job.gather(self.rank, value)

    def step(self, step):
        self.state.step = step
        self.copies.after_step(step)
        self.parts.progress = (step,)


class Copied:
    """A job of processes with one worker each, of which some are in reserve."""

    def __init__(self, hosts, members, *, has_local=True, one_data_set=True, every=1):
        self.hosts, self.members, self.memories = dict(enumerate(hosts)), tuple(members), {}
        self.losses, self.generation, self.why, self.small, self.short_of_memory = (), 0, "", b"", False
        self.under_way = False
        self.processes = [
            Process(self, slot, has_local=has_local, one_data_set=one_data_set) for slot in range(len(hosts))
        ]
        assert [process.copies.open(every, "program") for process in self.processes] == [""] * len(hosts)
        self.copies, self.under_way = [process.copies for process in self.processes], True

    def take(self, step, slots=None):
        """Compute a step on all members, and take the copy that is due, perhaps on some of them only."""
        for slot in self.members:
            self.processes[slot].step(step)
        for slot in self.members if slots is None else slots:
            self.copies[slot].take(self.processes[slot].parts)

    def lose(self, *slots):
        self.members = tuple(slot for slot in self.members if slot not in slots)
        self.losses, self.generation = (*self.losses, SimpleNamespace(workers=slots)), self.generation + 1

    def join(self, *slots):
        """Let workers join, and hand over what lost ones have left. Returns the notes of each member."""
        before, self.members = self.members, tuple(sorted({*self.members, *slots}))
        for slot in set(slots) - set(before):
            self.copies[slot].adopt(deepcopy(self.copies[before[0]].export()))
        self.met, self.said = threading.Barrier(len(self.members), timeout=limit(10)), [b""] * len(self.members)
        with ThreadPoolExecutor(len(self.members)) as pool:
            return list(pool.map(lambda slot: self.copies[slot].hand_over(list(slots), "program"), self.members))

    def gather(self, rank, value):
        self.met.wait()
        self.said[rank] = value
        self.met.wait()
        return list(self.said)


def step_of(copies):
    """The step of the newest copy, of which all parts must be of that step; `None` without one."""
    if copies.newest() < 0:
        return None
    (progress, *_), (matrix, number) = copies.load()
    assert (matrix.dtype, number.dtype, number.shape) == (np.float32, np.int32, ())
    np.testing.assert_array_equal(matrix, np.full((2, 3), progress[0]))
    assert number == progress[0]
    return progress[0]


@pytest.mark.parametrize("has_local", [True, False])
def test_a_copy_of_the_run_is_used_once_all_members_have_published_their_parts(has_local):
    job = Copied([0, 0, 0], (0, 1), has_local=has_local, every=2)
    reserve = job.copies[2]
    assert step_of(reserve) is None
    for step in range(1, 6):
        job.take(step)
    assert step_of(reserve) == 4
    job.take(6, [0])  # worker 1 dies before it has published
    assert step_of(reserve) == (4 if has_local else 6)
    for step in (8, 10):
        job.take(step, [1])
    assert step_of(reserve) == (None if has_local else 6)  # a worker's last two copies are kept


def test_where_no_copy_would_be_read_none_is_taken():
    job = Copied([0, 0], (0, 1), has_local=False)
    job.take(1)
    assert [copies.due for copies in job.copies] == [None, None]
    assert not any(job.memories.values())
    job = Copied([0, 0, 0], (0, 1), has_local=False)
    job.take(1, [])
    assert [copies.due for copies in job.copies] == [(1, 1), (1, 1), None]
    for copies in job.copies:
        copies.gone([2])  # the reserve
    job.take(2)
    assert [copies.due for copies in job.copies[:2]] == [None, None]


def test_one_that_joins_from_the_reserve_is_expected_there_again_when_it_leaves_and_joins():
    job = Copied([0, 0, 0], (0, 1), has_local=False)
    job.lose(1)
    job.join(2)
    job.take(1)
    assert job.copies[0].due is None
    assert job.memories[0] == {}, "nobody is in reserve: slot 1 is empty"
    job.join(1)
    job.members = (0, 2)  # it was released to the reserve
    job.take(2)
    assert step_of(job.copies[1]) == 2


def test_after_the_end_of_the_copies_none_counts():
    job = Copied([0, 0, 0], (0, 1))
    job.take(1)
    assert job.processes[2].holder is job.copies[2]
    job.copies[1].close()
    assert (step_of(job.copies[2]), job.copies[1].active, job.processes[1].holder) == (None, False, None)


def test_a_world_without_copies_says_why():
    process = Copied([0, 0], (0,)).processes[1]
    process.job.why = "one process"
    assert MemoryCopies(process, process.state, one_data_set=True).open(1, "program") == "one process"


@pytest.mark.parametrize(
    ("joined", "one_data_set", "heirs"),
    [([2], True, {2: 1}), ([1], True, {1: 1}), ([2], False, {}), ([1, 2], False, {1: 1}), ([3, 2], True, {3: 1})],
)
def test_one_that_joins_continues_the_newest_state_of_a_lost_one(joined, one_data_set, heirs):
    job = Copied([0, 0, 0, 0], (0, 1), one_data_set=one_data_set)
    for step in (1, 2):
        job.take(step)
    job.lose(1)
    notes = job.join(*joined)
    assert {slot: process.state.adopted for slot, process in enumerate(job.processes) if process.state.adopted} == {
        heir: [orphan, 2] for heir, orphan in heirs.items()
    }
    said = [
        f"worker {heir} continues the per-worker state of worker {orphan} after step 2."
        for heir, orphan in heirs.items()
    ]
    assert notes == [said] * len(job.members)


def test_what_nobody_could_continue_waits_for_the_next_one_that_joins():
    job = Copied([0] * 6, (0, 1, 2))
    job.take(1)
    job.copies[0].after_step(2)
    job.lose(1, 2)
    assert len(job.join(3)[0]) == 1
    assert job.join()[0] == []
    assert job.join(4)[0] == ["worker 4 continues the per-worker state of worker 2 after step 1."]
    assert (job.processes[3].state.adopted, job.processes[4].state.adopted) == ([1, 1], [2, 1])
    job.members, job.generation = (0, 3), job.generation + 1
    for slot in job.members:
        job.copies[slot].gone([4])
    assert job.join(1)[0] == []
    job.take(7)
    assert step_of(job.copies[5]) == 7, "serial numbers are those of all members"


def test_a_worker_that_was_lost_before_its_first_copy_leaves_nothing():
    job = Copied([0] * 5, (0, 1, 2))
    for slot in job.members:
        job.processes[slot].step(1)
    for slot in (0, 2):
        job.copies[slot].take(job.processes[slot].parts)
    job.lose(1, 2)
    assert job.join(3, 4)[0] == ["worker 4 continues the per-worker state of worker 2 after step 1."]
    assert (job.processes[3].state.adopted, job.processes[4].state.adopted) == (None, [2, 1])


def test_of_a_lost_worker_the_newest_copy_of_any_member_counts(monkeypatch):
    monkeypatch.setattr(copy_places, "CopyPuller", Pulled)
    job = Copied([0, 0, 1, 1], (0, 1, 2))
    job.take(1)
    job.copies[2]._places[-1]._puller.pull()  # the partner of worker 1, on the other host
    job.take(2)
    job.lose(1)
    assert job.join(3)[0] == ["worker 3 continues the per-worker state of worker 1 after step 2."]
    assert job.processes[3].state.adopted == [1, 2]


def test_copies_of_another_host_are_fetched_by_the_partner_and_by_the_reserve(monkeypatch):
    monkeypatch.setattr(copy_places, "CopyPuller", Pulled)
    job = Copied([0, 1, 0, 1], (0, 1))
    pullers = [copies._places[-1]._puller for copies in job.copies]
    assert [puller.wanted() for puller in pullers] == [
        {1: ["local"]},
        {0: ["local"]},
        {1: ["full", "local"], 3: ["full", "local"]},
        {0: ["full", "local"], 2: ["full", "local"]},
    ]
    job.take(1)
    assert step_of(job.copies[3]) is None
    for puller in pullers:
        puller.pull()
    assert [step_of(copies) for copies in job.copies[2:]] == [1, 1]
    job.lose(1)
    assert job.join(2)[0] == ["worker 2 continues the per-worker state of worker 1 after step 1."]
    assert job.processes[2].state.adopted == [1, 1]
    job.copies[0].close()
    assert pullers[0].closed
    assert step_of(job.copies[3]) is None, "the other host has ended its copies"


def test_members_without_state_of_their_own_fetch_nothing(monkeypatch):
    monkeypatch.setattr(copy_places, "CopyPuller", Pulled)
    job = Copied([0, 1, 1], (0, 1), has_local=False)
    assert [copies._places[-1]._puller.wanted() for copies in job.copies] == [{}, {}, {0: ["full"]}]


def test_new_memory_replaces_the_old_once_there_is_a_copy_in_it():
    job = Copied([0, 0, 0], (0, 1))
    job.take(1)
    job.hosts[3] = 0  # of a spawned process
    new = Process(job, 3, has_local=True, one_data_set=True)
    new.created = job.processes[0].created
    job.processes.append(new)
    job.copies.append(new.copies)
    assert new.copies.open(1, "program") == ""
    assert [copies.has_place() for copies in job.copies] == [True, True, True, False]
    left_out = Process(job, 2, has_local=True, one_data_set=True).copies
    left_out._places = list(job.copies[2]._places)
    for process in job.processes:
        process.copies.create(process.create_copies)
    assert [copies.has_place() for copies in job.copies] == [True] * 4
    reserve = job.copies[2]
    assert step_of(left_out) == 1
    assert step_of(reserve) == 1
    job.join(3)
    assert (step_of(reserve), step_of(left_out)) == (1, None)
    job.take(2, [0, 1])
    assert step_of(reserve) == 1, "worker 3 has published no part of it"
    job.take(3)
    assert step_of(reserve) == 3


@pytest.mark.parametrize("why", ["memory is short: No space left on device", "the state of hooks and data takes"])
def test_a_process_that_cannot_copy_goes_on_without(why, caplog):
    job = Copied([0, 0, 0], (0, 1))
    job.take(1)
    job.short_of_memory, job.small = "short" in why, b"" if "short" in why else bytes(1 << 20)
    job.take(2, [0]), job.take(3, [0])
    assert caplog.text.count(f"this process copies no more of its state to memory: {why}") == 1
    job.short_of_memory, job.small = False, b""
    job.take(4)
    assert step_of(job.copies[2]) == 1
