"""Values that workers publish, read from shared memory or requested over TCP."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from collectives.worlds.mailboxes import fetching, serving
from collectives.worlds.mailboxes.flows import StrangerError, greet_asker, greet_owner
from collectives.worlds.mailboxes.mailbox import (
    CreateMailbox,
    Mailboxes,
    ProcessMailbox,
    prepare_environment,
    why_none,
)
from collectives.worlds.mailboxes.memory import Files
from collectives.worlds.mailboxes.seqlock import SlotLayout
from collectives.worlds.mailboxes.serving import QUESTION, MailboxEndpoint, MailboxServer, PublishedCopies
from collectives.worlds.shared_file import SharedFile, SharedFileAddress, open_shared
from collectives.worlds.transport.process_group import Process
from tests.collectives.worlds.mpi_of_threads import MPI, Job, processes
from tests.speed import limit

COVERS = (
    "collectives/worlds/mailboxes/fetching.py",
    "collectives/worlds/mailboxes/flows.py",
    "collectives/worlds/mailboxes/memory.py",
    "collectives/worlds/mailboxes/seqlock.py",
    "collectives/worlds/mailboxes/serving.py",
    "collectives/worlds/shared_file.py",
)

NUMBERS = 1000


@pytest.fixture
def services(monkeypatch):
    monkeypatch.setattr(serving, "own_hosts", lambda: ["127.0.0.1"] * 2)
    made, mailboxes = [MailboxServer() for _ in range(3)], []
    monkeypatch.setattr(CreateMailbox, "made_for_tests", mailboxes, raising=False)
    yield made
    for ends in (*mailboxes, *made):
        ends.stop()


def mailboxes_of(services, hosts=(0, 0, 1), numbers=NUMBERS, worker_slots=1) -> list[ProcessMailbox]:
    """A mailbox of processes on these hosts, as each of them has it."""
    everyone = [
        Process(range(worker_slots * i, worker_slots * (i + 1)), f"h{h}", h, os.getpid()) for i, h in enumerate(hosts)
    ]

    def make(comm):
        making = CreateMailbox("", (8 * numbers, 4), lambda: everyone, lambda: services[comm.rank], None)
        making.carry_out(comm)
        return making.result

    mailboxes = Job(len(hosts)).run(make)
    CreateMailbox.made_for_tests.extend(mailboxes)
    return mailboxes


def constant(number, numbers=NUMBERS):
    return [np.full(numbers, number, np.float64), np.full(1, number, np.float32)]


def seen(found):
    """Return the published value, one number."""
    if found is None:
        return None
    many, one = found[0].view(np.float64), found[1].view(np.float32)
    assert (many == many[0]).all()
    assert one[0] == many[0]
    return many[0]


def until(is_so):
    deadline = time.monotonic() + limit(20)
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def link(owner, addresses=None) -> fetching.OwnerConnection:
    return fetching.OwnerConnection(
        owner, addresses or owner.addresses[:1], fetching.AnswerTimeout(), fetching.BufferPool(8 * NUMBERS + 64)
    )


def shown(service):
    """A process that publishes, and its address."""
    (mailbox,) = mailboxes_of([service], [0])
    mailbox.publish(0, 3, constant(7))
    return mailbox, mailbox.shown_by(service)


def test_all_see_all(services):
    mailboxes = mailboxes_of(services, worker_slots=2)
    for rank, mailbox in enumerate(mailboxes):
        for worker in (2 * rank, 2 * rank + 1):
            mailbox.publish(worker, 3, constant(worker))
    for rank, mailbox in enumerate(mailboxes):
        for worker in range(6):
            for reader in (2 * rank, 2 * rank + 1):
                assert seen(mailbox.look(worker, reader, 3)) == worker
                assert mailbox.look(worker, reader, 4) is None
    mailboxes[0].publish(1, 4, constant(10))
    assert [seen(mailbox.look(1, 2 * rank, 4)) for rank, mailbox in enumerate(mailboxes)] == [10] * 3
    assert [mailbox.look(1, 2 * rank, 3) for rank, mailbox in enumerate(mailboxes)] == [None] * 3
    assert [len(mailbox._links) for mailbox in mailboxes] == [2, 2, 4]  # of two readers each


@pytest.mark.parametrize(("rank", "pause"), [(1, 0.002), (2, 0.0)])
def test_copies_are_consistent_during_writes(services, rank, pause):
    """Whose memory is not seen is never written too fast to be read."""
    mailboxes, over = mailboxes_of(services, numbers=50_000), threading.Event()

    def write():
        number = 0
        while not over.is_set():
            number += 1
            mailboxes[0].publish(0, 3, constant(number, 50_000))
            time.sleep(pause)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last, times = 0, 0
        while times < 20:
            found = seen(mailboxes[rank].look(0, rank, 3))
            assert found is None or found >= last
            times, last = times + (found is not None and found > last), found or last
    finally:
        over.set()
        writer.join()


def test_a_process_that_does_not_answer_delays_one_read(services, monkeypatch):
    """Its host accepts data, as for a stopped process."""
    waits, is_ready = [], fetching._is_ready
    monkeypatch.setattr(fetching, "_is_ready", lambda line, on, s: waits.append(s) or is_ready(line, on, s))
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        silent = link(MailboxEndpoint((stopped.getsockname(),), b"key", 1))
        assert [silent.look(0, 3) for _ in range(5)] == [None] * 5
        silent.close()
    assert sum(wait > 0 for wait in waits) in (1, 2)  # to be connected, and then for its greeting
    assert sum(wait == 0 for wait in waits) >= 4


def test_a_late_answer_is_taken_and_then_there_is_another(services, monkeypatch):
    may, newest = threading.Event(), PublishedCopies.newest
    monkeypatch.setattr(
        PublishedCopies, "newest", lambda self, place, round: may.wait(limit(20)) and newest(self, place, round)
    )
    mailbox, owner = shown(services[0])
    late = link(owner)
    assert late.look(0, 3) is None
    mailbox.publish(0, 3, constant(8))
    assert late.look(0, 3) is None
    assert late._patience.seconds == fetching._LONGEST / 2
    may.set()
    until(lambda: (found := late.look(0, 3)) is not None and found[:8].view(np.float64)[0] == 8)
    may.clear()
    assert late.look(0, 3) is None
    mailbox.publish(0, 4, constant(9))
    may.set()
    # What comes is of the round before.
    found = []
    until(lambda: found.append(late.look(0, 4)) or found[-1] is not None)
    assert found[-1][:8].view(np.float64)[0] == 9
    late.close()


def test_a_late_answer_to_another_question_is_not_taken_for_this_one(services, monkeypatch):
    may, newest = threading.Event(), PublishedCopies.newest
    monkeypatch.setattr(
        PublishedCopies, "newest", lambda self, place, round: may.wait(limit(20)) and newest(self, place, round)
    )
    (mailbox,) = mailboxes_of(services[:1], [0], worker_slots=2)
    for worker in (0, 1):
        mailbox.publish(worker, 3, constant(7 + worker))
    late = link(mailbox.shown_by(services[0]))
    assert late.look(0, 3) is None
    may.set()
    found = []
    until(lambda: found.append(late.look(1, 3)) or found[-1] is not None)
    assert found[-1][:8].view(np.float64)[0] == 8
    late.close()


def test_an_ended_process_is_missing(services):
    _board, owner = shown(services[0])
    reader = link(owner)
    assert reader.look(0, 3) is not None
    services[0].stop()
    assert reader.look(0, 3) is None
    reader._not_before = 0.0
    assert reader.look(0, 3) is None  # it is refused
    reader.close()


def test_a_board_that_is_no_more_has_nothing(services):
    mailbox, owner = shown(services[0])
    reader = link(owner)
    assert reader.look(0, 3) is not None
    mailbox.stop()
    assert reader.look(0, 3) is None
    assert reader._line is not None
    reader.close()


def test_strangers_are_neither_answered_nor_believed(services):
    _board, owner = shown(services[0])
    without = link(owner._replace(key=b"another"))
    until(lambda: without.look(0, 3) is None and without._line is None)
    with socket.create_connection(owner.addresses[0]) as stranger:
        stranger.settimeout(limit(20))
        stranger.sendall(b"\0" * 48 + QUESTION.pack(1, 0, 3))
        assert len(stranger.recv(1000)) == 16  # what is to be sealed
        with suppress(ConnectionResetError):  # it is, if what was sent was not read
            assert stranger.recv(1000) == b""
    with socket.create_server(("127.0.0.1", 0)) as other:
        # Another process, which has the address of the owner's in a network of its own; then the owner.
        both = link(owner, [other.getsockname(), owner.addresses[0]])
        assert both.look(0, 3) is None
        line, _ = other.accept()
        line.setblocking(False)
        greeting = greet_asker(line, b"another")
        try:
            for _ in greeting:
                both.look(0, 3)
        except StrangerError as error:
            assert "does not have the key" in str(error)  # noqa: PT017
        line.close()
        until(lambda: both.look(0, 3) is not None)
        assert both._addresses[0] == owner.addresses[0]
    both.close()


def test_a_reader_that_does_not_read_blocks_nobody(services):
    numbers = 4_000_000  # more than a line holds
    mailboxes = mailboxes_of(services, (0, 1, 2), numbers)
    mailboxes[0].publish(0, 3, constant(1, numbers))
    owner = mailboxes[1]._links[1, 0]._owner
    with socket.create_connection(owner.addresses[0]) as greedy:
        greedy.setblocking(False)
        for waits in greet_owner(greedy, owner.key):
            select.select([greedy] * (waits == fetching.select.POLLIN), [], [], 0.1)
        greedy.sendall(QUESTION.pack(owner.mailbox, 0, 3))
        until(lambda: seen(mailboxes[1].look(0, 1, 3)) == 1)
        mailboxes[0].publish(0, 3, constant(2, numbers))
        until(lambda: seen(mailboxes[1].look(0, 1, 3)) == 2)
        assert seen(mailboxes[2].look(0, 2, 3)) in (None, 2)
        greedy.setblocking(True)
        got = bytearray()
        while len(got) < 8 + 8 * numbers:
            got += greedy.recv(1 << 20)
        assert (np.frombuffer(got[8 : 8 + 8 * numbers], np.float64) == 1).all()


def test_memory_that_cannot_be_opened_is_asked_for(services, monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    mailboxes = mailboxes_of(services, (0, 0))
    mailboxes[0].publish(0, 3, constant(5))
    assert seen(mailboxes[1].look(0, 1, 3)) == 5
    assert len(mailboxes[1]._links) == 1


def test_files_of_other_processes_are_checked_by_their_header(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "other").write_bytes(bytes(1000))
    (tmp_path / "short").write_bytes(b"")
    memory, there = Files(64), Files(64)
    paths = {1: f"{tmp_path}/fifo", 2: f"{tmp_path}/other", 3: f"{tmp_path}/short", 4: "/nowhere", 5: ""}
    addresses = {rank: SharedFileAddress(path, there.address.token) for rank, path in paths.items()}
    memory.open(0, {0: memory.address, **addresses, 6: there.address})
    assert [rank for rank in range(7) if memory.has(rank)] == [0, 6]
    there.own[:] = 9
    room = np.zeros(64, np.uint8)
    memory.copy(6, 0, room)
    assert (room == 9).all()
    for files in (memory, there):
        files.close()


def test_addresses_of_ones_own_host_are_tried_last():
    own = [a.address for all_of in psutil.net_if_addrs().values() for a in all_of if a.family == socket.AF_INET]
    tried = fetching.most_likely_first([(own[0], 1), ("203.0.113.9", 2), ("127.77.0.1", 3)])
    assert [port for _, port in tried] == [3, 2, 1]


def test_a_server_with_an_ended_thread_can_be_stopped():
    """The thread also ends if a request arrives while the server stops, before its bell rings."""
    server = MailboxServer()
    server._over = True  # as `stop` sets it first
    socket.create_connection(server._door.getsockname()).close()
    server._thread.join(limit(20))
    server._over = False
    server.stop()
    assert not server._thread.is_alive()


def test_the_room_of_a_result_is_used_again_at_the_next_look(services):
    mailboxes = mailboxes_of(services, (0, 0))
    mailboxes[0].publish(0, 3, constant(5))
    addresses = set()
    for _ in range(4):
        found = mailboxes[1].look(0, 1, 3)
        assert seen(found) == 5
        addresses.add(found[0].ctypes.data)
        assert mailboxes[1].look(0, 1, 4) is None
    assert len(addresses) == 1


def test_a_copy_for_readers_is_shared_and_not_overwritten_while_it_is_sent():
    layout, writing = SlotLayout([8]), threading.Lock()
    place = np.zeros(2 * layout.place, np.uint8)

    def copy(start, room):
        room[:] = place[start : start + room.size]

    def publish(round, value):
        layout.write(place[layout.place :], round, [np.full(8, value, np.uint8)], lambda: None)

    shown = PublishedCopies(layout, copy, writing)
    assert shown.newest(1, 3) is None
    publish(3, 1)
    first = shown.newest(1, 3)
    assert shown.newest(1, 4) is None
    assert shown.newest(1, 3) is first
    first.readers = 1
    publish(3, 2)
    second = shown.newest(1, 3)
    assert second is not first
    assert (first.slot[0], second.slot[0]) == (1, 2)
    publish(3, 3)
    assert shown.newest(1, 3) is second  # nobody receives it
    assert second.slot[0] == 3
    tries = []

    def torn(start, room):  # unless no worker can publish
        copy(start, room)
        if room.size == layout.slot and not writing.locked():
            tries.append(publish(3, 4) or publish(3, 4))

    assert PublishedCopies(layout, torn, writing).newest(1, 3).slot[0] == 4
    assert tries


def test_an_answer_is_waited_for_by_how_long_others_took():
    patience = fetching.AnswerTimeout()
    assert patience.seconds == fetching._LONGEST
    patience.in_time()
    assert patience.seconds == fetching._LONGEST
    for _ in range(9):
        patience.late()
    assert patience.seconds == fetching._LEAST
    patience.in_time()
    assert patience.seconds == 2 * fetching._LEAST


@pytest.mark.parametrize(("host", "tried"), [(0, [("127.0.0.1", 1)]), (1, [("203.0.113.9", 3), ("10.0.0.7", 2)])])
def test_a_process_is_asked_at_addresses_for_its_host(monkeypatch, host, tried):
    monkeypatch.setattr("collectives.worlds.mailboxes.mailbox.most_likely_first", lambda known: [*reversed(known)])
    files = Files(SlotLayout([8]).place)
    files.open(0, {})
    mailbox = ProcessMailbox(SlotLayout([8]), files, processes(0, host), 0)
    owner = MailboxEndpoint((("127.0.0.1", 1), ("10.0.0.7", 2), ("203.0.113.9", 3)), b"key", 1)
    mailbox.ask([owner, owner])
    assert {key: link._addresses for key, link in mailbox._links.items()} == {(0, 1): tried}
    files.close()


def test_a_shared_file_is_written_by_its_owner_alone():
    file = SharedFile(100)
    read = open_shared(file.address)
    file.memory[:] = 5
    file.memory[7] = 6
    assert read.tolist() == file.memory.tolist() == [5] * 7 + [6] + [5] * 92
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1
    for _ in range(2):
        file.close()
    with pytest.raises(OSError, match=file.address.path):
        open_shared(file.address)
    assert read[7] == 6


def test_where_memory_is_short_a_file_is_private(monkeypatch):
    def short(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", short)
    file = SharedFile(100)
    assert file.address.path == ""
    file.close()
    assert file.memory.tolist() == [0] * 100


# --- in windows of MPI ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 0)])
def test_windows_are_seen_on_their_host_and_freed_when_another_mailbox_replaces_them(services, hosts):
    everyone = processes(*hosts)

    def use(comm):
        kept, creations = Mailboxes(), []
        kept._service = services[comm.rank]

        def create(replaces):
            creations.append(kept.creation("", (8 * NUMBERS, 4), lambda: everyone, replaces, MPI))
            creations[-1].carry_out(comm)
            return kept.keep(creations[-1].result, replaces)

        first = create(None)
        window = first._memory._window
        CreateMailbox.made_for_tests.append(first)
        assert [first._memory.has(rank) for rank in range(3)] == [host == hosts[comm.rank] for host in hosts]
        first.publish(comm.rank, 3, constant(comm.rank + 1))
        comm.Barrier()
        assert [seen(first.look(rank, comm.rank, 3)) for rank in range(3)] == [1, 2, 3]
        comm.Barrier()
        second = create(first)
        assert window.freed
        assert first.name != second.name
        assert comm.allgather(second.name) == [second.name] * 3
        # Those that were on standby do not have it, so that nobody frees it.
        third = create(second if comm.rank else None)
        assert not second._memory._window.freed
        comm.Barrier()
        kept.free_among(everyone[:2])
        assert not third._memory._window.freed
        left = [mailbox._memory._window for mailbox in (second, third)]
        kept.free_among(everyone)
        kept.free_among(everyone)
        kept.stop()
        return [each.freed for each in left]

    assert Job(3).run(use) == [[True, True]] * 3


def test_a_mailbox_of_files_that_is_replaced_is_not_kept_and_all_end_with_their_world():
    mailboxes, stopped = Mailboxes(), []
    made = [
        SimpleNamespace(name=name, stop=lambda n=n: stopped.append(n)) for n, name in enumerate([b"", b"x", b"", b""])
    ]
    mailboxes.keep(made[0], None)
    assert mailboxes.keep(made[1], made[0]) is made[1]
    mailboxes.keep(made[2], made[1])  # whose window is freed by all together
    mailboxes.keep(made[3], None)
    server = mailboxes._serve()
    assert mailboxes._serve() is server
    for _ in range(2):
        mailboxes.stop()
    assert stopped == [1, 2, 3]
    assert not server._thread.is_alive()


@pytest.mark.parametrize(
    ("environ", "set_to"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "^ucx"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_osc": "rdma"}, "rdma"),
    ],
)
def test_on_one_host_mpi_loads_no_components_for_networks(environ, set_to):
    prepare_environment(environ)
    assert environ.get("OMPI_MCA_osc") == set_to


@pytest.mark.parametrize(("level", "says"), [(3, ""), (4, ""), (2, "MPI was initialized for one thread at a time")])
def test_a_mailbox_needs_an_mpi_for_several_threads(level, says):
    why = why_none(SimpleNamespace(THREAD_MULTIPLE=3, Query_thread=lambda: level))
    assert why.startswith(says)
    assert bool(why) == bool(says)
