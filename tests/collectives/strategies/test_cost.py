"""The cost of a step on a link: bytes compared with the messages, and seconds with a calculation by hand."""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import collectives as comm
import collectives.strategies as sync
from adaptive import CollectiveError
from adaptive.base.reductions import Sliced
from collectives.strategies._cost import PREAMBLE_BYTES
from collectives.strategies._traffic import ModelMessage, Traffic
from collectives.worlds.reducing.custom_on_processes import by_slices, gathered
from collectives.worlds.reducing.inter_host import InterHostSum

SGD, OUTER = optax.sgd(0.1), optax.sgd(0.7)
SLOW = sync.Link("1Mbit/s", latency=0.0)


class Counted:
    """A communicator of one rank that counts the bytes it sends to each other one; nothing arrives."""

    def __init__(self, rank, size, senders=None):
        self.rank, self.size, self.senders = rank, size, senders
        self.to = Counter()

    def Wait(self):
        pass

    def Irecv(self, room, other, tag):
        room[...] = 0
        return self

    def Isend(self, sent, other, tag):
        self.to[other] += sent.nbytes
        return self

    def allgather(self, own):
        return [own] * self.size

    def Allreduce(self, own, total):
        total[...] = own

    def Alltoallv(self, outgoing, incoming):
        array, (counts, _) = outgoing
        for other, count in enumerate(counts):
            self.to[other] += int(count) * array.itemsize
        incoming[0][...] = 0

    def Allgatherv(self, own, placed):
        for other in range(self.size):
            self.to[other] += own.nbytes
        placed[0][...] = 0

    def to_others(self, own_host):
        return sum(count for other, count in self.to.items() if other not in own_host)


def sent_by_code(message, parameters, hosts, each):
    """The bytes that the first host sends, as the transports count them."""
    nbytes, here, total = message.nbytes(parameters), range(each), 0
    if message.op == "sum":
        one = Counted(0, hosts)
        reduced = InterHostSum(one, np.zeros(nbytes // 4, np.float32))
        for act in (reduced.begin, reduced.add, reduced.finish):
            act()
        return one.to_others([0])
    for rank in here:
        one = Counted(rank, hosts * each)
        if isinstance(message.op, Sliced):
            flat = np.ones(nbytes, np.uint8) if hasattr(message.op, "codec") else np.ones(nbytes // 4, np.float32)
            by_slices(one, message.op, {rank: flat}, np.empty_like(flat), 1)
        else:
            rows = np.ones((hosts * each, nbytes), np.uint8)
            gathered(one, {rank: rows}, np.empty_like(rows))
        total += one.to_others(here)
    return total


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize(
    "strategy",
    [
        sync.synchronous(SGD),
        sync.synchronous(SGD, op="median"),
        sync.diloco(SGD, OUTER, 1, wire="4bit"),
        sync.diloco(SGD, OUTER, 1, wire=comm.top_k(64)),
    ],
    ids=["sum", "median", "codes", "top_k"],
)
def test_bytes_between_hosts_are_those_that_the_transports_send(strategy, each):
    hosts, parameters = 4, 2048 * 8 * 8
    (message,) = strategy.traffic().messages
    expected = sent_by_code(message, parameters, hosts, each)
    if strategy.name == "diloco" and not isinstance(message.op, Sliced) and each > 1:
        expected //= each  # the rows of a host's workers are counted once for each other host
    found = sync.step_cost(strategy, parameters, SLOW, hosts=hosts, workers_per_host=each)
    assert found.bytes_between_hosts - 2 * PREAMBLE_BYTES == pytest.approx(expected, rel=0.005)


def test_messages_of_pairs_follow_their_schedule():
    def rows(schedule, hosts, each):
        found = sync.step_cost(
            sync.pair_averaging(SGD, schedule), 1000, SLOW, hosts=hosts, workers_per_host=each
        ).bytes_between_hosts
        return (found - 2 * PREAMBLE_BYTES) / 4000

    assert rows("ring", 4, 1) == 2
    assert rows("ring", 4, 3) == 2
    assert rows("exponential", 4, 1) == 1
    assert rows([[(0, 1), (2, 3)]], 2, 2) + PREAMBLE_BYTES / 4000 == 0, "within hosts, and a preamble less"
    assert rows([[(0, 2), (1, 3)], [(0, 1), (2, 3)]], 2, 2) + PREAMBLE_BYTES / 4000 == 1


def test_islands_that_are_hosts_send_by_one_worker_once_in_a_round():
    hosts, steps, parameters = 2, 10, 2048 * 64

    def sent(strategy, each):
        found = sync.step_cost(strategy, parameters, SLOW, hosts=hosts, workers_per_host=each).bytes_between_hosts
        return found - PREAMBLE_BYTES * (1 + 2 / steps)

    plain = sync.islands(SGD, OUTER, steps, [[0, 1], [2, 3]])
    assert sent(plain, 2) == pytest.approx(4 * parameters / steps, abs=1)
    across = sync.islands(optax.adam(0.1), OUTER, steps, [[0, 2], [1, 3]])
    state = 4 * 3 * parameters + 4  # parameters and both moments, and a count
    assert sent(across, 2) == pytest.approx(2 * 4 * parameters + (4 * parameters + 2 * state) / steps, abs=1)
    coded = sync.islands(SGD, OUTER, steps, [[0, 1], [2, 3]], wire="4bit")
    (_, message, _) = coded.traffic().messages
    nbytes = message.nbytes(parameters)
    assert sent(coded, 2) == pytest.approx((nbytes / 2 + nbytes / 2) / steps, abs=1), "slices and results, once each"


def test_seconds_are_latencies_and_bytes():
    link = sync.Link("8kbit/s", latency=2.0)
    strategy = sync.local_steps(SGD, 4)
    found = sync.step_cost(strategy, 1000, link, hosts=4, compute=3.0)
    preamble, whole = 2 * (2.0 + PREAMBLE_BYTES / 1000), 4 * 2.0 + 1.5 * 4000 / 1000
    assert found.exchange_seconds == pytest.approx((preamble + whole) / 4)
    assert (found.compute_seconds, found.hidden) == (3.0, 0)
    assert found.seconds == pytest.approx(3 + found.exchange_seconds)
    assert found.computing == pytest.approx(3 / found.seconds)
    alone = sync.step_cost(strategy, 1000, link, hosts=1, workers_per_host=4)
    assert (alone.exchange_seconds, alone.bytes_between_hosts, alone.computing) == (0, 0, 1)


def test_messages_beside_local_steps_are_hidden_by_them():
    def cost(compute, overlap=True):
        strategy = sync.streamed(SGD, OUTER, 8, 2, overlap=overlap)
        return sync.step_cost(strategy, 10_000, sync.Link("80kbit/s", latency=0.0), hosts=2, compute=compute)

    preamble = PREAMBLE_BYTES / 10_000
    fragment = 20_000 / 10_000 + preamble
    assert cost(10.0).hidden == pytest.approx(fragment / (fragment + preamble))
    assert cost(10.0).seconds == pytest.approx(10 + preamble / 4)
    assert cost(0.1).hidden == pytest.approx(4 * 0.1 / (fragment + preamble))
    assert cost(0.1).seconds == pytest.approx((fragment + preamble) / 4)
    assert cost(10.0, overlap=False).hidden == 0


def test_workers_wait_for_the_slowest_once_in_a_step_of_the_program():
    seconds = np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 5.0]])
    every, rounds = (sync.step_cost(s, 10, 1e9, hosts=2, compute=seconds) for s in (sync.synchronous(SGD), two_steps()))
    assert every.compute_seconds == pytest.approx((2 + 2 + 5) / 3)
    assert rounds.compute_seconds == pytest.approx((3 + 5) / 3), "the last round is cut short"


def two_steps():
    return sync.local_steps(SGD, 2)


def test_rounds_by_quorum_end_with_most_workers_and_a_grace_period():
    slow = np.array([[1.0, 1.1, 1.2, 9.0], [1.0, 1.1, 1.2, 1.3], [1.0, 1.1, 1.2, 0.0]])
    found = [
        sync.step_cost(sync.quorum(SGD, OUTER, 1, **options), 10, 1e9, hosts=2, workers_per_host=2, compute=slow)
        for options in ({"grace": 0.5}, {"grace": 0.0}, {"quorum": 4})
    ]
    # Three of four, and three of three where one is absent.
    assert found[0].compute_seconds == pytest.approx((1.5 * 1.2 + 1.3 + 1.2) / 3)
    assert found[1].compute_seconds == pytest.approx((1.2 + 1.2 + 1.2) / 3)
    assert found[2].compute_seconds == pytest.approx((9.0 + 1.3 + 1.2) / 3)
    assert sync.step_cost(sync.quorum(SGD, OUTER, 1), 10, 1e9, hosts=2, compute=2.0).compute_seconds == 2


@pytest.mark.parametrize(
    ("rate", "bits"),
    [
        ("10Mbit/s", 1e7),
        ("100 Gbit/s", 1e11),
        ("1.5Gbps", 1.5e9),
        ("8kbit", 8e3),
        (1e6, 1e6),
        ("1e6", 1e6),
        ("2T", 2e12),
    ],
)
def test_rates_of_links(rate, bits):
    assert sync.Link(rate).rate == bits


@pytest.mark.parametrize("rate", ["fast", "10MB/s", "", 0, -1.0, "0Mbit/s", float("nan"), float("inf"), None, "1.2.3M"])
def test_rates_that_are_none(rate):
    with pytest.raises(CollectiveError, match="must be bits per second"):
        sync.Link(rate)


@pytest.mark.parametrize(
    ("strategy", "options", "complaint"),
    [
        (sync.synchronous(SGD), {"hosts": 0}, "hosts=0 must be a positive whole number"),
        (sync.synchronous(SGD), {"parameters": 1.5}, "parameters=1.5 must be"),
        (sync.synchronous(SGD), {"workers_per_host": "2"}, "workers_per_host='2' must be"),
        (sync.synchronous(SGD), {"compute": [1.0]}, r"shape \(steps, workers\)"),
        (sync.synchronous(SGD), {"compute": -1.0}, "must be seconds"),
        (sync.synchronous(SGD), {"link": sync.Link}, "must be bits per second"),
        (sync.hybrid(sync.synchronous(SGD), sync.synchronous(SGD)), {}, "Pass the strategy that is active"),
        (sync.Strategy("mine", *(lambda *_: None,) * 4), {}, "'mine' does not declare what it sends"),
    ],
)
def test_arguments_that_are_refused(strategy, options, complaint):
    given = {"parameters": 100, "link": 1e6, "hosts": 2} | options
    with pytest.raises(CollectiveError, match=complaint):
        sync.step_cost(strategy, given.pop("parameters"), given.pop("link"), **given)
    with pytest.raises(CollectiveError, match="latency"):
        sync.Link(1e6, latency=-1.0)


def test_a_user_strategy_declares_its_messages():
    halves = Traffic((ModelMessage("sum", lambda parameters: 2 * parameters),), local_steps=4)
    mine = sync.Strategy("mine", *(lambda *_: None,) * 4, traffic=lambda: halves)
    found = sync.step_cost(mine, 1000, SLOW, hosts=2)
    assert found.bytes_between_hosts == (2000 + PREAMBLE_BYTES) / 4
    assert jnp.isfinite(found.seconds)
