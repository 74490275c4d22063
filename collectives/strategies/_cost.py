"""What a strategy's step costs on a link between hosts: a model of its seconds and bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from adaptive.base.numbers import real, whole
from adaptive.base.reductions import Gathered, Mixed, Sliced
from collectives._leaves import error

from ._strategy import Strategy
from ._traffic import ModelMessage, Traffic

PREAMBLE_BYTES = 1024  # of the sum that every message begins with
_SCHEDULE_STEPS = 64  # over which a schedule of pairs is averaged
_RATE = re.compile(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kKMGT]?)(?:bits?|b)?(?:/s|ps)?\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Link:
    """The link of each host to the others, which carries its rate in both directions at once.

    Attributes:
      rate: bits per second; or a string such as "100Mbit/s".
      latency: seconds of a small message, one way.

    Raises:
      CollectiveError: the rate is not a positive number of bits per second, or the latency is not a number of seconds.

    Example:
      >>> import collectives.strategies as sync
      >>> sync.Link("100Mbit/s", latency=0.02).rate
      100000000.0
    """

    rate: float | str
    latency: float = 1e-4

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", self._bits_per_second(self.rate))
        if real(self.latency) is None or not 0 <= self.latency < math.inf:
            raise error("Link", f"latency={self.latency!r} must be seconds, such as  latency=0.0001")

    @staticmethod
    def _bits_per_second(rate: Any) -> float:
        found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
        try:
            number = float(found[1]) * _PREFIXES[found[2]] if found else real(rate)
        except ValueError:
            number = None
        if number is None or not 0 < number < math.inf:
            raise error("Link", f'rate={rate!r} must be bits per second, such as  "100Mbit/s", "10Gbit/s"  or  1e9')
        return number


class StepCost(NamedTuple):
    """What a local step costs, as the mean over a round."""

    compute_seconds: float  # of the slowest worker, between two points at which all wait for each other
    exchange_seconds: float  # on the link between hosts
    hidden: float  # share of `exchange_seconds` in which workers compute
    bytes_between_hosts: float  # that a host sends to other hosts

    @property
    def seconds(self) -> float:
        """Seconds of a local step, in all."""
        return self.compute_seconds + (1 - self.hidden) * self.exchange_seconds

    @property
    def computing(self) -> float:
        """The share of a step in which workers compute; 1 if it takes no time."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0


def step_cost(
    strategy: Strategy,
    parameters: float,
    link: Link | str | float,
    *,
    hosts: int,
    workers_per_host: int = 1,
    compute: ArrayLike = 0.0,
) -> StepCost:
    """Return what a local step of a strategy costs, for a model of float32 parameters on hosts that a link joins.

        seconds = compute + exchange - hidden        exchange = latency * messages + 8 * bytes / rate

    Bytes are those that a host sends to other hosts, in the messages of the program's plan and in their preambles. With
    h hosts of m workers, and b bytes from each worker, a host sends

        2 (h - 1) / h * b        of a sum of numbers, which its workers reduce among themselves first
        2 m (h - 1) / h * b      of codes of a few bits, and of values for a robust reduction; from islands and with
                                 `hosts=` m = 1
        m (h - 1) * b            of `top_k`, whose values are gathered; MPI may send up to m times as much
        b for each worker of another host that averages a worker's values, in pairs and within islands

    Messages are those that follow one another, such as log2(h) in a preamble. Transfers within a host take no time.
    Computing takes as long as on the slowest worker; in rounds by quorum, as long as on the worker that ends a round,
    and the grace period if there are later ones.

    Args:
      strategy: from `collectives.strategies`; except `hybrid`, which sends what its active strategy sends.
      parameters: number of parameters.
      link: the link of each host; a rate such as "100Mbit/s", or a `Link` with a latency.
      hosts: number of hosts.
      workers_per_host: number of workers on each host; workers of a host have consecutive numbers.
      compute: seconds that a worker computes in a local step; or those of each step and worker, measured or simulated,
        shape=(steps, workers).

    Returns:
      The cost of a local step.

    Raises:
      CollectiveError: an argument is out of range, or the strategy does not say what it sends.

    Example:
      >>> import optax, collectives.strategies as sync
      >>> every_step = sync.synchronous(optax.sgd(0.1))
      >>> rounds = sync.local_steps(optax.sgd(0.1), 100, wire="4bit")
      >>> for strategy in (every_step, rounds):
      ...     cost = sync.step_cost(strategy, 100e6, "100Mbit/s", hosts=4, compute=0.5)
      ...     print(f"{cost.seconds:.2f} s, {cost.bytes_between_hosts / 1e6:.1f} MB, {cost.computing:.0%} computing")
      48.50 s, 600.0 MB, 1% computing
      0.56 s, 0.8 MB, 89% computing
    """
    n_hosts, each, size = _counts(hosts=hosts, workers_per_host=workers_per_host, parameters=parameters)
    if strategy.traffic is None:
        advice = "Pass the strategy that is active." if strategy.name == "hybrid" else "Give it a  traffic=…"
        raise error("step_cost", f"the strategy {strategy.name!r} does not declare what it sends. {advice}")
    traffic, over = strategy.traffic(), link if isinstance(link, Link) else Link(link)
    placed = [range(host * each, (host + 1) * each) for host in range(n_hosts)]
    computing = _compute_seconds(compute, traffic)
    sent = [_Sent.of(message, message.nbytes(size), placed) for message in traffic.messages]
    if any(message.beside for message in traffic.messages):
        sent.append(_Sent.preamble(n_hosts))  # of the loss, which follows when the local steps are done
    seconds = [one.seconds(over) for one in sent]
    beside = sum(took for took, message in zip(seconds, traffic.messages, strict=False) if message.beside)
    exchange, hidden = sum(seconds), min(beside, computing * traffic.local_steps)
    return StepCost(
        computing,
        exchange / traffic.local_steps,
        hidden / exchange if exchange else 0.0,
        sum(one.nbytes for one in sent) / traffic.local_steps,
    )


def _counts(**given: Any) -> list[int]:
    found = [whole(value) for value in given.values()]
    for (name, value), number in zip(given.items(), found, strict=True):
        if number is None or number < 1:
            raise error("step_cost", f"{name}={value!r} must be a positive whole number.")
    return found  # type: ignore[return-value]


def _compute_seconds(compute: ArrayLike, traffic: Traffic) -> float:
    """Return the seconds per local step, if workers wait for each other after each step of the program."""
    seconds = np.asarray(compute, np.float64)
    if seconds.ndim not in (0, 2) or not np.isfinite(seconds).all() or (seconds < 0).any() or not seconds.size:
        raise error("step_cost", "compute= must be seconds: one number, or finite ones of shape (steps, workers).")
    if seconds.ndim == 0:
        return float(seconds)
    rounds = np.add.reduceat(seconds, np.arange(0, len(seconds), traffic.local_steps))
    ends = rounds.max(axis=1)
    if traffic.quorum is not None:
        for number, own in enumerate(rounds):
            there = np.sort(own[own > 0])
            if len(there):
                ends[number] = min(there[-1], (1 + traffic.grace) * there[traffic.quorum(len(there)) - 1])
    return float(ends.sum() / len(seconds))


class _Sent(NamedTuple):
    """What a host sends in a step of the program, for one kind of message."""

    nbytes: float
    latencies: float  # of messages that follow one another

    @classmethod
    def preamble(cls, hosts: int) -> _Sent:
        depth = _depth(hosts)
        return cls(PREAMBLE_BYTES * depth, depth)

    @classmethod
    def of(cls, message: ModelMessage, nbytes: int, hosts: Sequence[range]) -> _Sent:
        """Return what the message and its preamble take, as the mean over steps.

        Args:
          nbytes: that each worker contributes.
          hosts: the workers of each host.
        """
        before, depth = cls.preamble(len(hosts)), _depth(len(hosts))
        others, workers = len(hosts) - 1, len(hosts[0])
        op, senders = message.op, workers
        if message.islands is not None:
            first = {min(island) for island in message.islands}
            senders = max(len(first.intersection(host)) for host in hosts)
        if isinstance(op, Mixed):
            own = cls(_rows_to_other_hosts(op, hosts) * nbytes, min(depth, 1))
        elif isinstance(op, Gathered):
            own = cls(senders * others * nbytes, 2 * depth)
        elif isinstance(op, Sliced) and not op.is_sum:
            # Slices to those who reduce them, and the results to all: once to each host if only one worker of it sends.
            passes = senders + (workers if message.islands is None else 1)
            own = cls(passes * others / len(hosts) * nbytes if senders else 0, 3 * depth)
        else:
            own = cls(2 * others / len(hosts) * nbytes, 2 * depth)
        return cls((before.nbytes + own.nbytes) / message.every, (before.latencies + own.latencies) / message.every)

    def seconds(self, link: Link) -> float:
        """Return how long that takes."""
        return link.latency * self.latencies + 8 * self.nbytes / float(link.rate)


def _depth(hosts: int) -> int:
    """Return how many messages follow one another when all hosts hear of all others."""
    return (hosts - 1).bit_length()


def _rows_to_other_hosts(op: Mixed, hosts: Sequence[range]) -> float:
    """Return how many workers' values the busiest host sends to other hosts, as the mean over a schedule's steps."""
    host_of = {worker: number for number, host in enumerate(hosts) for worker in host}
    members, most = list(host_of), []
    for step in range(1, _SCHEDULE_STEPS + 1):
        sent = [0] * len(hosts)
        for taker, givers in op.weights(step, members).items():
            for giver in givers:
                sent[host_of[giver]] += host_of[giver] != host_of[taker]
        most.append(max(sent))
    return sum(most) / len(most)
