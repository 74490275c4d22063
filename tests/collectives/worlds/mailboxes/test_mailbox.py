"""Values that workers publish, read from shared memory or requested over TCP."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest

from collectives.worlds import connections
from collectives.worlds.connections import accept, connect, most_likely_first
from collectives.worlds.mailboxes import remote
from collectives.worlds.mailboxes.mailbox import CreateMailbox, Mailboxes, ProcessMailbox
from collectives.worlds.mailboxes.remote import MailboxEndpoint, MailboxServer, RemoteReader
from collectives.worlds.transport.process_group import Process
from tests.collectives.worlds.mpi_of_threads import Job
from tests.speed import limit

COVERS = ("collectives/worlds/mailboxes/remote.py", "collectives/worlds/connections.py")

NUMBERS = 1000


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(remote, "own_hosts", lambda: ["127.0.0.1"] * 2)
    made, mailboxes = [MailboxServer() for _ in range(3)], []
    monkeypatch.setattr(CreateMailbox, "made_for_tests", mailboxes, raising=False)
    yield made
    for ends in (*mailboxes, *made):
        ends.stop()


def mailboxes_of(servers, hosts=(0, 0, 1), numbers=NUMBERS, worker_slots=1) -> list[ProcessMailbox]:
    """A mailbox of processes on these hosts, as each of them has it."""
    everyone = [
        Process(range(worker_slots * i, worker_slots * (i + 1)), f"h{h}", h, os.getpid()) for i, h in enumerate(hosts)
    ]

    def make(comm):
        making = CreateMailbox("", (8 * numbers, 4), lambda: everyone, lambda: servers[comm.rank])
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


def answers(answer):
    """Return a server's endpoint, and a reader's view of it; `answer(worker, round)` returns a number or None."""
    server = MailboxServer()
    owner = server.serve(
        lambda worker, round: None if (n := answer(worker, round)) is None else np.full(NUMBERS, n, np.uint8)
    )
    return server, owner, reader_of(owner)


def reader_of(owner, addresses=None):
    return RemoteReader(owner, addresses or owner.addresses[:1], lambda: np.empty(NUMBERS, np.uint8))


def test_all_see_all(servers):
    mailboxes = mailboxes_of(servers, worker_slots=2)
    assert [len(mailbox._remote) for mailbox in mailboxes] == [2, 2, 4]  # of two readers each
    for rank, mailbox in enumerate(mailboxes):
        for worker in (2 * rank, 2 * rank + 1):
            mailbox.publish(worker, 3, constant(worker))
    for rank, mailbox in enumerate(mailboxes):
        for worker in range(6):
            for reader in (2 * rank, 2 * rank + 1):
                until(lambda m=mailbox, w=worker, r=reader: seen(m.look(w, r, 3)) == w)
    mailboxes[0].publish(1, 4, constant(10))
    assert seen(mailboxes[1].look(1, 2, 4)) == 10
    assert mailboxes[1].look(1, 2, 3) is None


@pytest.mark.parametrize(("rank", "pause"), [(1, 0.002), (2, 0.0)])
def test_copies_are_consistent_during_writes(servers, rank, pause):
    """What other hosts ask for is never written too fast to be read."""
    mailboxes, over = mailboxes_of(servers, numbers=50_000), threading.Event()

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


def test_memory_that_cannot_be_opened_is_asked_for(servers, monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    mailboxes = mailboxes_of(servers, (0, 0))
    mailboxes[0].publish(0, 3, constant(5))
    until(lambda: seen(mailboxes[1].look(0, 1, 3)) == 5)


def test_the_room_of_a_result_is_used_again_at_the_next_look(servers):
    mailboxes = mailboxes_of(servers, (0, 0))
    mailboxes[0].publish(0, 3, constant(5))
    addresses = set()
    for _ in range(4):
        found = mailboxes[1].look(0, 1, 3)
        assert seen(found) == 5
        addresses.add(found[0].ctypes.data)
        assert mailboxes[1].look(0, 1, 4) is None
    assert len(addresses) == 1


def test_a_mailbox_that_is_replaced_has_nothing_and_all_end_with_their_world(servers):
    owner, asks = mailboxes_of(servers, (0, 1))
    owner.publish(0, 3, constant(5))
    until(lambda: seen(asks.look(0, 1, 3)) == 5)
    kept = Mailboxes()
    kept.keep(owner, None)
    kept.keep(asks, owner)
    assert asks.look(0, 1, 3) is None
    kept.stop()


# --- over TCP ---------------------------------------------------------------------------------------------------------


def test_a_process_that_does_not_answer_delays_one_read(monkeypatch):
    """Its host accepts data, as for a stopped process."""
    monkeypatch.setattr(remote, "_LONGEST", 0.02)
    waits = []
    monkeypatch.setattr(remote, "wait", lambda futures, seconds, wait=remote.wait: waits.append(1) or wait(futures, 0))
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        silent = reader_of(MailboxEndpoint((stopped.getsockname(),), b"key", 1))
        assert [silent.look(0, 3) for _ in range(5)] == [None] * 5
        silent.close()
    assert len(waits) == 1


def test_a_late_answer_is_taken_if_it_is_asked_for_again_and_the_timeout_is_halved():
    may, value = threading.Event(), [7]
    server, _, late = answers(lambda worker, round: may.wait(limit(20)) and value[0] + worker)
    assert late.look(0, 3) is None
    assert late.look(0, 3) is None
    assert late._patience == remote._LONGEST / 2
    may.set()
    found = []
    until(lambda: found.append(late.look(0, 3)) or found[-1] is not None)
    assert found[-1][0] == 7
    assert late.look(0, 3)[0] == 7
    may.clear()
    assert late.look(0, 3) is None
    may.set()
    until(lambda: found.append(late.look(1, 3)) or found[-1] is not None)
    assert found[-1][0] == 8  # and not the late answer to another question
    late.close()
    server.stop()


def test_an_ended_process_is_missing_and_so_is_what_it_no_longer_serves():
    server, owner, reader = answers(lambda worker, round: 5 if round == 3 else None)
    until(lambda: reader.look(0, 3) is not None)
    assert reader.look(0, 4) is None
    server.remove(owner.mailbox)
    assert reader.look(0, 3) is None
    for _ in range(2):
        server.stop()
    assert reader.look(0, 3) is None
    assert reader.look(0, 3) is None
    reader.close()


def refuses(door):
    with suppress(OSError):
        accept(door, b"another")


def test_strangers_are_neither_answered_nor_believed(monkeypatch):
    monkeypatch.setattr(connections, "_SECONDS_TO_GREET", 1)
    server, owner, reader = answers(lambda worker, round: 5)
    without = reader_of(owner._replace(key=b"another"))
    assert without.look(0, 3) is None
    with pytest.raises(OSError, match="another process answers"):
        connect(owner.addresses[:1], b"another", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        # Another process, which has the address of the owner's in a network of its own; then the owner.
        threading.Thread(target=refuses, args=(other,), daemon=True).start()
        both = reader_of(owner, [other.getsockname(), owner.addresses[0]])
        until(lambda: both.look(0, 3) is not None)
    for ends in (without, both, reader):
        ends.close()
    server.stop()


def test_a_reader_that_does_not_read_delays_nobody():
    size = 40_000_000  # more than a line holds
    server = MailboxServer()
    owner = server.serve(lambda worker, round: np.full(size, 1, np.uint8))
    greedy = connect(owner.addresses[:1], owner.key, 5.0)
    greedy.send_bytes(remote._QUESTION.pack(owner.mailbox, 0, 3))
    reader = RemoteReader(owner, owner.addresses[:1], lambda: np.empty(size, np.uint8))
    until(lambda: (found := reader.look(0, 3)) is not None and found.all())
    reader.close()
    greedy.close()
    server.stop()


def test_addresses_of_ones_own_host_are_tried_last():
    own = [a.address for all_of in psutil.net_if_addrs().values() for a in all_of if a.family == socket.AF_INET]
    tried = most_likely_first([(own[0], 1), ("203.0.113.9", 2), ("127.77.0.1", 3)])
    assert [port for _, port in tried] == [3, 2, 1]
