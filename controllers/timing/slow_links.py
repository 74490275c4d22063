"""Slow links: when the messages of a program take longer than before, and which host's links are the reason.

All workers wait in an exchange for its slowest link, so its seconds say that a link is slow, and not which one. When
they have a change point, or have grown slowly to far above their best, a probe of the links between hosts is needed
(`Decision.probe`). It is compared with a probe from the time before.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from adaptive.base.decision import Observation
from adaptive.base.link_probe import LinkProbe

from .change_points import ChangePoints

AGAIN = 2.0  # a phase in which no host was named is probed again when it has cost this many times as much
WORSE_THAN_BEST = 1 / 0.7  # a gradual change counts from this factor on (NVRx's score of 0.7)
LEVEL = 5  # blocks over which a gradual change is measured
LEAST = 1.1  # least factor between the times of a link that is named and those before
PART = 0.5  # and the least part of the messages' own change that it must have
_NOTES = 4  # hosts and links of one probe that a note describes


class SlowLinks(NamedTuple):
    """Detector of slow links. A pytree; methods return a new one.

    Attributes:
      changes: of the seconds of messages, one series.
      best: least logarithm of their level so far; NaN at first. A level is a mean over `LEVEL` blocks.
      since: first step of the slow phase; 0 outside one.
      probability: of the change, until it is reported; 1 for a gradual one, 0 afterwards.
      asked: the step after which a probe was asked for; 0 if none is awaited.
      probed: the seconds lost in the slow phase when it was probed last; 0 before.
      known: shape=(n,), int64: number of probes of each worker's links outside slow phases, or in its first.
      fastest, slowest: shape=(n,), seconds to send a megabyte over the fastest and slowest link of each worker's host,
        the least of those probes; NaN where not known.
      suspected: shape=(n,), bool: the workers of the hosts that the last probe has named, until another confirms it.
      named: shape=(n,), bool: the workers of the hosts that two probes in a row have named.
      lost: shape=(n,), seconds of messages lost so far in slow phases for which the worker's host was named.
      unnamed: seconds lost in the present phase while no host was named.
      size: number of members whose messages are measured.
    """

    changes: ChangePoints
    best: np.ndarray
    since: np.ndarray
    probability: np.ndarray
    asked: np.ndarray
    probed: np.ndarray
    known: np.ndarray
    fastest: np.ndarray
    slowest: np.ndarray
    suspected: np.ndarray
    named: np.ndarray
    lost: np.ndarray
    unnamed: np.ndarray
    size: np.ndarray

    @classmethod
    def init(cls, n_workers: int) -> SlowLinks:
        """Return the state without measurements."""
        zero, unknown, none = np.asarray(0), np.full(n_workers, np.nan), np.zeros(n_workers, bool)
        return cls(
            changes=ChangePoints.init(1),
            best=np.asarray(np.nan),
            since=zero,
            probability=np.asarray(0.0),
            asked=zero,
            probed=np.asarray(0.0),
            known=np.zeros(n_workers, np.int64),
            fastest=unknown,
            slowest=unknown,
            suspected=none,
            named=none,
            lost=np.zeros(n_workers),
            unnamed=np.asarray(0.0),
            size=zero,
        )

    @property
    def slow(self) -> bool:
        """Whether messages take longer than before."""
        return bool(self.since > 0)

    @property
    def factor(self) -> float:
        """Their seconds over those before the slow phase; 1 outside one."""
        return float(self.changes.factor[0])

    # --- seconds of messages ------------------------------------------------------------------------------------------

    def observe(self, step: int, seconds: float) -> SlowLinks:
        """Return the state after a step.

        Args:
          step: its number.
          seconds: of the messages of the step before, without waiting for workers; NaN if unknown.
        """
        changes, onsets = self.changes.observe(np.array([seconds]), compare=False)
        state = self._replace(changes=changes)
        if changes.filled == 0 and np.isfinite(changes.own[0, -LEVEL:]).all():
            state = state._compared_with_best(step)
        if onsets:
            start, probability = max(step - onsets[0].steps, 1), onsets[0].probability
            state = state._begun(start, probability, seconds * (onsets[0].steps - 1))
        if self.slow and not state.changes.slow[0]:
            none = np.zeros_like(self.named)
            return state._replace(since=np.asarray(0), suspected=none, named=none, unnamed=np.asarray(0.0))
        return state._counted(seconds)

    def _compared_with_best(self, step: int) -> SlowLinks:
        latest = self.changes.own[0, -LEVEL:]
        best = float(np.fmin(latest.mean(), self.best))
        state = self._replace(best=np.asarray(best))
        if self.changes.slow[0] or latest.min() - best < math.log(WORSE_THAN_BEST):
            return state
        # The slow phase has begun gradually: it ends when the messages are about as fast as at their best.
        state = state._replace(changes=self.changes._replace(before=np.array([best])))
        return state._begun(step, 1.0, 0.0)

    def _begun(self, step: int, probability: float, seconds: float) -> SlowLinks:
        return self._replace(
            since=np.asarray(step),
            probability=np.asarray(probability),
            probed=np.asarray(0.0),
            asked=np.asarray(0),
            unnamed=np.asarray(seconds * (1 - 1 / self.factor)),
        )

    def _counted(self, seconds: float) -> SlowLinks:
        """Return the state with the seconds lost in a step."""
        if not (self.slow and seconds > 0):
            return self
        lost = seconds * (1 - 1 / self.factor)
        if not self.named.any():
            return self._replace(unnamed=np.asarray(float(self.unnamed) + lost))
        return self._replace(lost=np.where(self.named, self.lost + lost, self.lost))

    def sized(self, members: int) -> SlowLinks:
        """Return the state for this number of members: of another number, the seconds of messages are not known yet."""
        if members == self.size:
            return self
        fresh = SlowLinks.init(len(self.known))
        kept = {name: getattr(self, name) for name in ("known", "fastest", "slowest", "lost")}
        return fresh._replace(size=np.asarray(members), **kept)

    def of_size(self, members: int) -> SlowLinks:
        """Return the state for this number of members after a swap, whose messages take as long as before it."""
        return self._replace(size=np.asarray(members))

    def without_named(self) -> SlowLinks:
        """Return the state after the named workers have left: links are probed anew if messages cost as much again."""
        none, cost = np.zeros_like(self.named), self.lost[self.named].max(initial=0.0)
        return self._replace(suspected=none, named=none, unnamed=np.asarray(0.0), probed=np.asarray(cost / AGAIN))

    # --- probes -------------------------------------------------------------------------------------------------------

    def wants_probe(self, members: tuple[int, ...]) -> bool:
        """Return whether a probe would tell anything: about a slow phase, or about the links before one.

        Links are probed twice before: at first, and when a slow phase could be found.
        """
        if self.slow and not self.named.any():
            return bool(self.suspected.any() or self.unnamed > AGAIN * self.probed)
        wanted = 1 + bool(np.isfinite(self.changes.own).all() and not self.slow)
        return bool(self.known[list(members)].min() < wanted)

    def awaiting(self, step: int) -> SlowLinks:
        """Return the state after a request for a probe."""
        return self._replace(asked=np.asarray(step))

    def heard(self, observation: Observation) -> tuple[tuple[str, ...], SlowLinks]:
        """Return notes and the state after a due step, at which a probe may have arrived."""
        probe = observation.links
        if not self.asked or probe is None or probe.step < self.asked:
            return (), self
        state = self._replace(asked=np.asarray(0))
        if not self.slow:
            return (), state._remembering(probe)
        state = state._replace(known=np.maximum(self.known, _probed(probe)))
        if self.named.any():  # it was made for a worker that has joined
            return (), state
        notes, found = self._verdict(probe)
        named, state = found & self.suspected, state._replace(probed=self.unnamed)
        if found.any() and not self.suspected.any():
            return (), state._replace(suspected=found)
        none, lost = np.zeros_like(named), np.where(named, self.lost + self.unnamed, self.lost)
        unnamed = np.where(named.any(), 0.0, self.unnamed)
        notes = notes if named.any() or not found.any() else ("two probes of the links name different hosts",)
        return notes, state._replace(suspected=none, named=named, lost=lost, unnamed=unnamed)

    def _remembering(self, probe: LinkProbe) -> SlowLinks:
        fastest, slowest = (_of_workers(probe, links) for links in _of_hosts(probe))
        known = np.where(_probed(probe), self.known + 1, self.known)
        fastest, slowest = np.fmin(self.fastest, fastest), np.fmin(self.slowest, slowest)
        return self._replace(known=known, fastest=fastest, slowest=slowest)

    def _verdict(self, probe: LinkProbe) -> tuple[tuple[str, ...], np.ndarray]:
        """Return notes on what a probe in a slow phase has found, and the workers of the named hosts."""
        nobody = np.zeros(len(self.known), bool)
        if len(probe.hosts) < 2:
            return (), nobody
        fastest, slowest = _of_hosts(probe)
        before = [_before(probe, *links) for links in ((self.fastest, fastest), (self.slowest, slowest))]
        least = max(LEAST, 1 + PART * (self.factor - 1))
        ratios = fastest / before[0]
        hosts = np.flatnonzero(ratios > max(least, 1 + PART * (np.fmax.reduce(ratios, initial=1.0) - 1)))
        if len(hosts) > len(probe.hosts) // 2 or (len(probe.hosts) == 2 and len(hosts)):
            which = " and ".join(probe.hosts) if len(probe.hosts) == 2 else f"{len(hosts)} of {len(probe.hosts)} hosts"
            rate = _rates(float(np.nanmedian(fastest)), float(np.nanmedian(before[0])))
            return (f"the links of {which} are slow: {rate}. No host is to blame",), nobody
        if len(hosts):
            notes = [
                f"the links of host {probe.hosts[host]} ({_workers(probe, host)}) are slow: "
                f"{_rates(float(fastest[host]), float(before[0][host]))}"
                for host in hosts.tolist()[:_NOTES]
            ]
            return tuple(notes), np.isin(probe.host_of, hosts)
        if not np.any(slowest > least * before[1]):
            return ("no link between hosts is slower than before",), nobody
        a, b = sorted(np.unravel_index(np.nanargmax(probe.seconds), probe.seconds.shape))
        rate = _rates(float(probe.seconds[a, b]), float(min(before[1][a], before[1][b])))
        # Without either host the link is not used; the one with fewer workers costs less, and of equals the later.
        fewer = a if (probe.host_of == a).sum() < (probe.host_of == b).sum() else b
        note = f"the link between hosts {probe.hosts[a]} and {probe.hosts[b]} is slow: {rate}"
        return (note,), probe.host_of == fewer


def _of_hosts(probe: LinkProbe) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of each host's fastest and slowest link; shape=(hosts,), NaN without any."""
    known = np.isfinite(probe.seconds)
    some = known.any(axis=1)
    fastest = np.where(known, probe.seconds, np.inf).min(axis=1, initial=np.inf)
    slowest = np.where(known, probe.seconds, 0.0).max(axis=1, initial=0.0)
    return np.where(some, fastest, np.nan), np.where(some, slowest, np.nan)


def _of_workers(probe: LinkProbe, of_hosts: np.ndarray) -> np.ndarray:
    """Return a number of each worker's host; shape=(n,), NaN for slots of no member."""
    return np.where(probe.host_of >= 0, np.append(of_hosts, np.nan)[probe.host_of], np.nan)


def _probed(probe: LinkProbe) -> np.ndarray:
    """Return the workers that need no further probe; all in a world that cannot probe. shape=(n,), bool."""
    return (probe.host_of >= 0) | (not probe.hosts)


def _before(probe: LinkProbe, known: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Return the seconds of each host's links before; of a host that is new, the median of the others. shape=(hosts,).

    Args:
      known: of each worker's host, from earlier probes; shape=(n,).
      now: of each host, in this one; its median is taken if nothing is known.
    """
    found = np.full(len(probe.hosts), np.nan)
    for host in range(len(found)):
        own = known[probe.host_of == host]
        own = own[np.isfinite(own)]
        found[host] = own[0] if len(own) else np.nan
    some = np.isfinite(found)
    return np.where(some, found, np.median(found[some] if some.any() else now))


def _workers(probe: LinkProbe, host: int) -> str:
    slots = np.flatnonzero(probe.host_of == host).tolist()
    return f"worker{'s' * (len(slots) > 1)} {', '.join(map(str, slots))}"


def _rates(seconds: float, before: float) -> str:
    return f"{1 / seconds:.3g} MB/s, {1 / before:.3g} before"
