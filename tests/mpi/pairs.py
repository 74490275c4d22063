"""Workers that publish and look, on ranks; see test_pairs.py.

`mpirun -n 3 python pairs.py CASE …`
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import adaptive as ad
import collectives as comm

FOLDER, CASES = Path(sys.argv[1]), sys.argv[2:]
NUMBERS, ROUNDS = 50_000, 300
LAST = 2  # the rank that is not like the others


def until(is_so) -> None:
    while not is_so():
        time.sleep(0.001)


def sees(mailbox, worker, reader, round) -> bool:
    return mailbox.look(worker, reader, round) is not None


def mark(what: str) -> Path:
    return FOLDER / what.replace(" ", "-")


def whole_copies(world) -> None:
    """Ranks publish a constant and look at the others', each as fast as it can."""
    mailbox = world.create_mailbox([8 * NUMBERS, 4], "a mailbox of constants")
    own, seen = world.rank, dict.fromkeys(range(3), 0)
    for number in range(1, ROUNDS + 1):
        of_all = number * 10 + own
        mailbox.publish(own, 7, [np.full(NUMBERS, of_all, np.float64), np.full(1, of_all, np.float32)])
        other = (own + 1 + number % 2) % 3
        found = mailbox.look(other, own, 7)
        if found is not None:
            many, one = found[0].view(np.float64), found[1].view(np.float32)
            assert (many == many[0]).all(), "torn"
            assert many[0] == one[0], "torn"
            assert many[0] % 10 == other
            assert many[0] >= seen[other], "older than what was there"
            seen[other] = many[0]
    world.barrier()
    until(lambda: mailbox.look((own + 1) % 3, own, 7) is not None)
    assert many[0] <= 10 * ROUNDS + other
    assert mailbox.look((own + 1) % 3, own, 8) is None, "of another round"
    print("all copies were whole", flush=True)


def a_stopped_rank(world) -> None:
    """A stopped rank. A reader that waited for it would never return: it resumes after the reads."""
    mailbox = world.create_mailbox([8 * NUMBERS], "a mailbox with a stopped rank")
    pids = [int(pid) for pid in world.all_gather_bytes(str(os.getpid()).encode())]
    mailbox.publish(world.rank, 0, [np.full(NUMBERS, float(world.rank))])
    world.barrier()
    if world.rank == LAST:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        until(lambda: " T " in Path(f"/proc/{pids[LAST]}/stat").read_text() if ONE_HOST else True)
        for _ in range(20 if ONE_HOST else 2):
            found = mailbox.look(LAST, world.rank, 0)
            assert found is None or (found[0].view(np.float64) == LAST).all()
        assert found is not None or not ONE_HOST
        mark(f"rank {world.rank} has looked").touch()
    if world.workers[0] == WAKES:
        until(lambda: all(mark(f"rank {rank} has looked").exists() for rank in range(LAST)))
        os.kill(pids[LAST], signal.SIGCONT)
    world.barrier()
    until(lambda: mailbox.look(LAST, world.rank, 0) is not None)
    print("a stopped rank was in nobody's way", flush=True)


def local_step(w, minibatch):
    return comm.asynchronous_mean(w) - 0.1 * (w - minibatch.mean(0)), None


def held_up(w, batch):
    """The last rank takes its local steps when the others have taken theirs."""
    step = ad.step_number()

    def first(worker, step, w):
        if worker == LAST:
            until(lambda: all(mark(f"{rank} in {step}").exists() for rank in range(LAST)))
        return w

    def behind(worker, step, w):
        mark(f"{worker} in {step}").touch()
        return w

    w = io_callback(first, jax.ShapeDtypeStruct(w.shape, w.dtype), ad.worker_index(), step, w)
    w, _ = jax.lax.scan(local_step, w, ad.minibatches(batch, size=4))
    w = io_callback(behind, jax.ShapeDtypeStruct(w.shape, w.dtype), ad.worker_index(), step, w)
    return comm.all_reduce(w), {}


def programs(world) -> None:
    """No rank waits for a slow one."""
    data = np.random.default_rng(0).normal(2.0, 0.1, size=(360, 5)).astype(np.float32)
    with ad.Program(held_up, jnp.zeros(5), data, global_batch=72, shares=(9, 7, 2), resizable=False) as program:
        for _ in program.run(steps=4):
            pass
        np.testing.assert_allclose(program.state, data.mean(0), atol=1.0)
    print("nobody has waited", flush=True)


def dying_while_mailboxes_are_made(world) -> None:
    """Ranks die one after another, at any moment. Every rank that is left has a mailbox, and sees the others in it."""
    delays = np.random.default_rng(0).uniform(0, 0.03, size=world.size)
    own, mailbox, vectors = world.workers[0], None, [np.ones(NUMBERS)]
    for victim in range(world.size - 1, 0, -1):
        if own == victim:
            threading.Timer(delays[own], os.kill, (os.getpid(), signal.SIGKILL)).start()
        losses = len(world.losses)
        while len(world.losses) == losses:
            mailbox = world.create_mailbox([8 * NUMBERS], "a mailbox in the making", mailbox)
        mailbox = world.create_mailbox([8 * NUMBERS], "a mailbox for who is left", mailbox)
        left = tuple(range(victim))
        members = [process.worker_slots[0] for process in world.transport.group.everyone]
        assert tuple(members) == left, members
        mailbox.publish(own, victim, vectors)
        for other in left:
            until(partial(sees, mailbox, other, own, victim))
        world.barrier()
    print("the last one has a mailbox", flush=True)


with comm.world() as world:
    ONE_HOST = world.transport.group.one_host
    # A stopped process is woken up by one of its host.
    last = world.transport.group.everyone[LAST].host
    WAKES = min(p.worker_slots[0] for p in world.transport.group.everyone if p.host == last)
    for case in CASES:
        globals()[case](world)
print("ended well", flush=True)
