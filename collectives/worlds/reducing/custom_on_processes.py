"""Custom reductions (`Sliced`, `Mixed`) between processes: MPI sends host memory, and the host reduces.

A `Sliced` part is sent twice: each process receives one slice of all workers' values, reduces it, and sends the result
to all. A process sends and receives as many bytes as in an all-reduce, in the reduction's wire format. A `Mixed` part
is sent only to the workers that average it. Only processes that send values receive slices. Values of zeros are not
sent where they change no result; and of a sum over several hosts, the first process of each host sends the host's sum.
So slices travel between hosts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from adaptive.base.channel import Parts
from adaptive.base.reductions import Mixed, Reduction, Sliced, average, summed_statistics
from adaptive.base.world import World
from collectives.worlds.transport.operations import pieces

_TAG = 7103

RowsByWorker = Mapping[int, np.ndarray]  # one part's values, for each worker of this process


def by_slices(comm: Any, op: Sliced, rows: RowsByWorker, received: np.ndarray, step: int, hosts: Sequence[int]) -> None:
    """Reduce a part by a `Sliced` reduction into `received`, with the same result on all processes.

    `rows`: the values of this process's workers. `hosts`: the number of each rank's host.
    """
    flat, functions, number = received.reshape(-1), _functions(op), np.int32(step)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        sent = [np.asarray(functions.sent(x.reshape(-1), number, np.int32(worker))) for worker, x in rows.items()]
        leads = True
        if op.is_sum and 1 < len(set(hosts)) < len(hosts):
            leads = hosts.index(hosts[comm.rank]) == comm.rank
            of_host = _sum_on_host(comm, sent, hosts)
            # The number differs from every worker's: random rounding depends on it.
            sent = [np.asarray(functions.sent(of_host, number, np.int32(-1 - hosts[comm.rank])))]
        senders = _senders(comm, sent, skips_zeros=op.skips_zeros, sends=leads)
        bounds = _bounds(len(flat) // op.granule, op.granule, [any(of_process) for of_process in senders])
        found = _slice_of_all(comm, sent, senders, bounds)
        has_first = bounds[comm.rank] == 0 < bounds[comm.rank + 1]
        statistics = summed_statistics(functions, found, has_first, partial(_total, comm))
        own = np.asarray(functions.reduced(found, statistics, number, np.int32(comm.rank)))
    whole = np.empty(len(flat), own.dtype)
    _all_gather(comm, own, whole, np.diff(bounds), hosts)
    flat[:] = whole.astype(flat.dtype)


def _sum_on_host(comm: Any, sent: Sequence[np.ndarray], hosts: Sequence[int]) -> np.ndarray:
    """Return the sum of the host's values, in single precision, on the host's first process; elsewhere unspecified."""
    own = sent[0].astype(np.float32)
    for x in sent[1:]:
        own += x.astype(np.float32)
    first, *others = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
    if comm.rank != first:
        for piece in pieces(own):
            comm.Send(piece, first, _TAG)
        return own
    arriving = np.empty_like(own)
    for other in others:
        for piece in pieces(arriving):
            comm.Recv(piece, other, _TAG)
        own += arriving
    return own


def mixed(
    comm: Any, weights: Mapping[int, Mapping[int, float]], rows: RowsByWorker, carrier: Mapping[int, int]
) -> RowsByWorker:
    """Return the weighted mean of each worker of this process; its own value if it averages with no other.

    `weights`: see `Mixed.weights`. `carrier`: the rank of each worker's process.
    """
    here = {worker: np.ascontiguousarray(row) for worker, row in rows.items()}
    elsewhere: dict[tuple[int, int], np.ndarray] = {}
    under_way = []
    for taker in sorted(weights):  # in the same order on all processes, so that their messages match
        for giver in sorted(weights[taker]):
            there, here_too = carrier[giver] == comm.rank, carrier[taker] == comm.rank
            if here_too and not there:
                room = elsewhere[taker, giver] = np.empty_like(here[taker])
                under_way += [comm.Irecv(piece, carrier[giver], _TAG) for piece in pieces(room)]
            elif there and not here_too:
                under_way += [comm.Isend(piece, carrier[taker], _TAG) for piece in pieces(here[giver])]
    for request in under_way:
        request.Wait()
    return {
        worker: average(
            [
                (share, here[giver] if giver in here else elsewhere[worker, giver])
                for giver, share in sorted(weights[worker].items())
            ]
        )
        if worker in weights
        else row
        for worker, row in here.items()
    }


def _total(comm: Any, statistics: Any) -> np.ndarray:
    """Return statistics summed over all processes' slices, in double precision."""
    total = np.empty(statistics.shape, np.float64)
    comm.Allreduce(np.asarray(statistics, np.float64), total)
    return total.astype(statistics.dtype)


@lru_cache(maxsize=64)
def _functions(op: Sliced) -> SimpleNamespace:
    """Return the methods of a reduction, compiled."""
    names = "sent", "statistics", "further_statistics", "reduced"
    return SimpleNamespace(**{name: jax.jit(getattr(op, name)) for name in names})


def _senders(comm: Any, values: Sequence[np.ndarray], *, skips_zeros: bool, sends: bool) -> list[list[bool]]:
    """Return which workers of each process send: of those that `sends`, all or, with `skips_zeros`, not the zeros.

    If no worker would send, all do.
    """
    senders = comm.allgather([sends and (not skips_zeros or bool(row.any())) for row in values])
    return senders if any(map(any, senders)) else [[True] * len(of_process) for of_process in senders]


def _bounds(granules: int, granule: int, takes_slice: Sequence[bool]) -> list[int]:
    """Return where the processes' slices begin, and the end of the last: equal slices for those that take one."""
    before = accumulate(takes_slice, initial=0)
    return [granules * number // sum(takes_slice) * granule for number in before]


def _slice_of_all(
    comm: Any, values: Sequence[np.ndarray], senders: Sequence[Sequence[bool]], bounds: Sequence[int]
) -> np.ndarray:
    """Return this process's slice of the values of the workers that send; shape=(workers, elements of the slice)."""
    sent = [row for row, is_sent in zip(values, senders[comm.rank], strict=True) if is_sent]
    workers = np.array(list(map(sum, senders)))
    sizes, own = np.diff(bounds), int(np.diff(bounds)[comm.rank])
    if len(sent) == 1:
        (outgoing,) = sent
    else:
        of_slices = [row[start:stop] for start, stop in pairwise(bounds) for row in sent]
        outgoing = np.concatenate([values[0][:0], *of_slices])
    incoming = np.empty((int(workers.sum()), own), outgoing.dtype)
    comm.Alltoallv(_placed(outgoing, sizes * len(sent)), _placed(incoming, workers * own))
    return incoming


def _all_gather(comm: Any, own: np.ndarray, whole: np.ndarray, sizes: np.ndarray, hosts: Sequence[int]) -> None:
    """Gather arrays of several sizes from all processes.

    MPI's own algorithms may send an array to a host several times. So where some processes have nothing to send, as
    where one of each host speaks for the others, arrays pass once around a ring, in which a host's processes are
    neighbors. `whole` receives the arrays, by rank; `sizes`: the elements of each.
    """
    if sizes.all():
        comm.Allgatherv(_words(own), _placed(whole, sizes))
        return
    words, (counts, starts) = _placed(whole, sizes)
    arrays = [words[start : start + count] for start, count in zip(starts, counts, strict=True)]
    arrays[comm.rank][:] = _words(own)
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
    place = order.index(comm.rank)
    source, target = order[place - 1], order[(place + 1) % len(order)]
    for distance in range(len(order) - 1):
        outgoing, incoming = (pieces(arrays[order[place - distance - i]]) for i in (0, 1))
        under_way = [comm.Irecv(piece, source, _TAG) for piece in incoming]
        under_way += [comm.Isend(piece, target, _TAG) for piece in outgoing]
        for request in under_way:
            request.Wait()


def _placed(array: np.ndarray, sizes: np.ndarray) -> list[Any]:
    """Return MPI's buffer specification for an array whose piece i, of `sizes[i]` elements, belongs to rank i."""
    words = _words(array)
    counts = sizes * (len(words) // array.size if array.size else 1)
    return [words, (counts, np.concatenate([[0], np.cumsum(counts)[:-1]]))]


def _words(array: np.ndarray) -> np.ndarray:
    """View an array as integers of the same width, because MPI has no half precisions."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{min(array.itemsize, 8)}")


class CustomReductions:
    """The parts of one message that have a custom reduction, and their results.

    `buffers` receive all parts of the message; `ops` are their reductions.
    """

    def __init__(
        self,
        buffers: Sequence[np.ndarray],
        parts: Sequence[Parts],
        ops: Sequence[Reduction],
        world: World,
        step: int,
    ):
        self._buffers, self._ops, self._parts, self._world, self._step = buffers, ops, parts, world, step
        self._own: dict[int, RowsByWorker] = {}

    def reduce(self, comm: Any, slots: Sequence[Sequence[int]], hosts: Sequence[int]) -> None:
        """Reduce the parts over all processes; `slots`, `hosts`: the worker slots and host of each, by rank."""
        carrier = {worker: rank for rank, own in enumerate(slots) for worker in own}
        workers = self._world.workers
        for j, op in enumerate(self._ops):
            if isinstance(op, str):
                continue
            rows = {worker: np.asarray(row[j]) for worker, row in zip(workers, self._parts, strict=True)}
            if isinstance(op, Mixed):
                self._own[j] = mixed(comm, op.weights(self._step, self._world.members), rows, carrier)
                self._buffers[j][...] = self._own[j][workers[0]]
            elif isinstance(op, Sliced):
                by_slices(comm, op, rows, self._buffers[j], self._step, hosts)

    def insert_own(self, results: list[list[jax.Array]], devices: Sequence[jax.Device]) -> list[list[jax.Array]]:
        """Replace results that differ between workers: `results` holds the first worker's for all of them."""
        for j, rows in self._own.items():
            for i, (worker, device) in enumerate(zip(self._world.workers, devices, strict=True)):
                if i:
                    results[i][j] = jax.device_put(rows[worker], device)
        return results
