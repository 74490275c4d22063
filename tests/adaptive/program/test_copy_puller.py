"""Copies of workers on other hosts, fetched while their owner continues."""

from __future__ import annotations

import time

import numpy as np
import pytest

from adaptive.base.mailbox import LocalMailbox
from adaptive.program.copy_puller import NO_SERIAL, CopyPuller
from tests.speed import limit

OWNER, OTHER, READER = 0, 1, 2


class Job:
    """Mailboxes of one owner, and what fetches from them."""

    def __init__(self):
        self.index, self.boxes = LocalMailbox(), {"full": LocalMailbox(), "local": LocalMailbox()}
        names = list(self.boxes)
        self.puller = CopyPuller(self.index, self.boxes, READER, lambda: {OWNER: names, OTHER: names})

    def publish(self, serial: int, *names: str) -> None:
        for name in names:
            self.boxes[name].publish(OWNER, serial, [np.full(4, serial, np.uint8)])
        self.index.publish(OWNER, 0, [np.array([serial]).view(np.uint8)])

    def until_copied(self, serial: int) -> None:
        until = time.monotonic() + limit(20)
        while self.puller.latest(OWNER) != serial:
            assert time.monotonic() < until, self.puller.latest(OWNER)
            time.sleep(0.002)


@pytest.fixture
def job():
    job = Job()
    yield job
    job.puller.close()


def test_the_last_two_copies_are_retained(job):
    for serial in (3, 4, 7):
        job.publish(serial, "full", "local")
        job.until_copied(serial)
    assert job.puller.serials("full", OWNER) == job.puller.serials("local", OWNER) == [7, 4]
    assert job.puller.copy_of("full", OWNER, 4)[0].tolist() == [4] * 4
    assert job.puller.copy_of("full", OWNER, 3) is None


def test_a_worker_need_not_publish_all(job):
    job.publish(1, "local")
    job.until_copied(1)
    assert job.puller.serials("full", OWNER) == []
    assert job.puller.serials("local", OWNER) == [1]
    assert job.puller.latest(OTHER) is None


def test_an_owner_that_ends_its_copies_is_noticed(job):
    job.publish(1, "full")
    job.until_copied(1)
    job.publish(NO_SERIAL)
    job.until_copied(NO_SERIAL)


def test_a_pulled_copy_survives_the_owners_next_write(job):
    content = np.full(4, 1, np.uint8)
    job.boxes["full"].publish(OWNER, 1, [content])
    job.publish(1)
    job.until_copied(1)
    content[:] = 9
    assert job.puller.copy_of("full", OWNER, 1)[0].tolist() == [1] * 4
