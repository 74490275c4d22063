"""Values that workers publish, read from shared memory or requested over TCP."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from collectives.worlds import connections
from collectives.worlds.connections import accept, connect, shut_down
from collectives.worlds.mailboxes import remote
from collectives.worlds.mailboxes.mailbox import CreateMailbox, ProcessMailbox
from collectives.worlds.mailboxes.remote import MailboxServer, RemoteReader
from collectives.worlds.mailboxes.shared_memory import SlotLayout
from collectives.worlds.transport.process_group import Process
from tests.collectives.worlds.mpi_of_threads import Job
from tests.speed import limit

NUMBERS = 1000


@pytest.fixture
def mailboxes():
    """Makes a mailbox of processes on these hosts, as each of them has it."""
    made: list[ProcessMailbox] = []

    def make(hosts=(0, 0, 1), numbers=NUMBERS, worker_slots=1):
        everyone = [
            Process(range(worker_slots * i, worker_slots * (i + 1)), f"h{h}", h, os.getpid())
            for i, h in enumerate(hosts)
        ]

        def create(comm):
            making = CreateMailbox("", (8 * numbers, 4), lambda: everyone)
            making.carry_out(comm)
            return making.result

        made.extend(Job(len(hosts)).run(create))
        return made

    yield make
    for mailbox in made:
        mailbox.stop()


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
    """Return a server, and a reader's view of it; `answer(worker, round)` returns a number or None."""
    server = MailboxServer(
        lambda worker, round: None if (n := answer(worker, round)) is None else np.full(NUMBERS, n, np.uint8)
    )
    return server, reader_of(server.endpoint[0][-1:], server.endpoint[1])


def reader_of(addresses, key):
    return RemoteReader((addresses, key), NUMBERS)


def test_all_see_all(mailboxes):
    made = mailboxes(worker_slots=2)
    assert [len(mailbox._remote) for mailbox in made] == [2, 2, 4]  # of two readers each
    for rank, mailbox in enumerate(made):
        for worker in (2 * rank, 2 * rank + 1):
            mailbox.publish(worker, 3, constant(worker))
    for rank, mailbox in enumerate(made):
        for worker in range(6):
            for reader in (2 * rank, 2 * rank + 1):
                until(lambda m=mailbox, w=worker, r=reader: seen(m.look(w, r, 3)) == w)
    made[0].publish(1, 4, constant(10))
    assert seen(made[1].look(1, 2, 4)) == 10
    assert made[1].look(1, 2, 3) is None


@pytest.mark.parametrize(("rank", "pause"), [(1, 0.002), (2, 0.0)])
def test_copies_are_consistent_during_writes(mailboxes, rank, pause):
    """What other hosts ask for is never written too fast to be read."""
    made, over = mailboxes(numbers=50_000), threading.Event()

    def write():
        number = 0
        while not over.is_set():
            number += 1
            made[0].publish(0, 3, constant(number, 50_000))
            time.sleep(pause)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last, times = 0, 0
        while times < 20:
            found = seen(made[rank].look(0, rank, 3))
            assert found is None or found >= last
            times, last = times + (found is not None and found > last), found or last
    finally:
        over.set()
        writer.join()


def test_another_host_gets_what_is_published_too_often_to_be_copied(mailboxes, monkeypatch):
    """The owner stops publishing for one copy."""
    owner, asks = mailboxes((0, 1))
    owner.publish(0, 3, constant(5))
    copy = SlotLayout.copy_latest
    monkeypatch.setattr(SlotLayout, "copy_latest", lambda *arguments: owner._writing.locked() and copy(*arguments))
    until(lambda: seen(asks.look(0, 1, 3)) == 5)


def test_memory_that_cannot_be_opened_is_asked_for(mailboxes, monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    first, second = mailboxes((0, 0))
    first.publish(0, 3, constant(5))
    until(lambda: seen(second.look(0, 1, 3)) == 5)


# --- over TCP ---------------------------------------------------------------------------------------------------------


def test_a_process_that_does_not_answer_delays_one_read(monkeypatch):
    """Its host accepts data, as for a stopped process."""
    monkeypatch.setattr(remote, "_LONGEST", 0.02)
    waits = []
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda thread, seconds: waits.append(1) or join(thread, 0))
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        silent = reader_of([stopped.getsockname()], b"key")
        assert [silent.look(0, 3) for _ in range(5)] == [None] * 5
        silent.close()
    assert len(waits) == 1


def test_a_late_answer_is_taken_if_it_is_asked_for_again_and_the_timeout_is_halved():
    may, value = threading.Event(), [7]
    server, late = answers(lambda worker, round: may.wait(limit(20)) and value[0] + worker)
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


def test_a_connection_that_breaks_is_made_again(monkeypatch):
    monkeypatch.setattr(remote, "_SECONDS_APART", 0.0)
    server, reader = answers(lambda worker, round: 5)
    until(lambda: reader.look(0, 3) is not None)
    shut_down(reader._line)
    until(lambda: reader.look(0, 3) is not None)
    reader.close()
    server.stop()


def test_an_ended_process_is_missing():
    server, reader = answers(lambda worker, round: 5 if round == 3 else None)
    until(lambda: reader.look(0, 3) is not None)
    assert reader.look(0, 4) is None
    server.stop()
    assert reader.look(0, 3) is None
    assert reader.look(0, 3) is None
    reader.close()


def refuses(door):
    with suppress(OSError):
        accept(door, b"another")


def test_strangers_are_neither_answered_nor_believed(monkeypatch):
    monkeypatch.setattr(connections, "_SECONDS_TO_GREET", 1)
    server, reader = answers(lambda worker, round: 5)
    own, key = server.endpoint[0][-1], server.endpoint[1]
    without = reader_of([own], b"another")
    assert without.look(0, 3) is None
    with pytest.raises(OSError, match="another process answers"):
        connect([own], b"another", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        # Another process, which has the address of the owner's in a network of its own; then the owner.
        threading.Thread(target=refuses, args=(other,), daemon=True).start()
        both = reader_of([other.getsockname(), own], key)
        until(lambda: both.look(0, 3) is not None)
    for ends in (without, both, reader):
        ends.close()
    server.stop()
