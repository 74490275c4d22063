"""The stream of examples: every one once per epoch, whatever is resized.

Epoch after epoch, each in an order of its own, lie end to end. A step takes the next `global_batch` positions, and each
worker its share of them, in the order of workers. So the set and order of examples depend on the seed and the global
batches alone, and not on the split nor on the number of workers. The cursor is one integer.

Where workers have data of their own (`Shards`), each has such a *shard range*, with a cursor of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from adaptive.base.surroundings import Surroundings

from .examples import Rows

T = TypeVar("T")
QUICK_SECONDS = 300e-6


class Share(NamedTuple):
    """What this process computes in a step: one batch per worker that it carries; `None` for one without examples."""

    sizes: tuple[int, ...]  # of all workers
    offsets: tuple[int, ...]  # of this process's workers: where in the step's global batch their examples start
    batches: tuple[Any, ...]


Cursors = tuple[int, ...]  # examples taken so far from each shard


class _There(NamedTuple):
    """A share that was not worth a thread, in place of a future one."""

    share: Share

    def result(self, timeout: float | None = None) -> Share:
        del timeout
        return self.share

    def cancel(self) -> None:
        """Nothing to stop."""


class Stream:
    """Shares of the stream, the next one fetched while the current one is being computed on.

    Args:
      examples: the data set.
      seed: of the permutations.
      workers: the workers of this process.
    """

    def __init__(self, examples: Rows, *, seed: int, workers: range):
        self.examples, self.seed, self.workers = examples, seed, workers
        self.shard_ranges = examples.shard_ranges
        self.cursors: Cursors = (0,) * len(self.shard_ranges)
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adaptive-input")
        self._surroundings = Surroundings()  # of the thread that the data set was looked at in
        self._ahead: tuple[Cursors, tuple[int, ...], Future[Share] | _There] | None = None
        self._before: Cursors = ()  # where the cursors were when that was asked for
        self._quick = False  # whether the last share was fetched faster than a thread is woken up

    @property
    def consumed(self) -> int:
        """Examples taken so far, over all workers."""
        return sum(self.cursors)

    def take(self, sizes: Sequence[int]) -> Share:
        """The step's share. Moves nothing: call `advance` when the step is committed."""
        key = (self.cursors, tuple(sizes))
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[:2] == key:
                return ahead[2].result()
            ahead[2].cancel()
        return self._in_thread(self._fetch, *key).result()  # in one thread always, so sources need no locks

    def prefetch(self, sizes: Sequence[int]) -> None:
        """Start to fetch what the step after this one takes if nothing is resized."""
        key = (self._deal(self.cursors, sizes)[1], tuple(sizes))
        self._before = self.cursors
        # A few rows of arrays are there sooner than another thread is.
        ahead = _There(self._fetch(*key)) if self._quick else self._in_thread(self._fetch, *key)
        self._ahead = (*key, ahead)

    def advance(self, sizes: Sequence[int]) -> None:
        """A step of these sizes is done."""
        ahead = self._ahead
        if ahead is not None and ahead[1] == tuple(sizes) and self._before == self.cursors:
            self.cursors = ahead[0]  # as was worked out to fetch what follows
        else:
            self.cursors = self._deal(self.cursors, sizes)[1]

    def peek(self, sizes: Sequence[int]) -> Any:
        """All workers' examples in a step of these sizes, as one batch, in the order of workers. Moves nothing."""
        indices = np.concatenate(self._indices(self.cursors, sizes, range(len(sizes))))
        return self._in_thread(self.examples.rows, indices).result()

    def _in_thread(self, function: Callable[..., T], *args: Any) -> Future[T]:
        return self._pool.submit(self._surroundings.run, function, *args)

    def _fetch(self, cursors: Cursors, sizes: tuple[int, ...]) -> Share:
        began = time.thread_time()  # its own time: kernels may be running on this core meanwhile
        offsets, rows = list(accumulate(sizes, initial=0)), self.examples.rows
        batches = tuple([rows(i) if len(i) else None for i in self._indices(cursors, sizes, self.workers)])
        self._quick = self.examples.in_memory and time.thread_time() - began < QUICK_SECONDS
        return Share(sizes, tuple(offsets[self.workers.start : self.workers.stop]), batches)

    def _indices(self, cursors: Cursors, sizes: Sequence[int], workers: range) -> list[np.ndarray]:
        """Which examples each of these workers takes."""
        starts, _ = self._deal(cursors, sizes)
        return [self.indices(starts[w], sizes[w], self._shard_of(w)) for w in workers]

    def _deal(self, cursors: Cursors, sizes: Sequence[int]) -> tuple[list[int], Cursors]:
        """Each worker's first position in its shard, and where the cursors are after the step."""
        if len(self.shard_ranges) == 1:
            *starts, end = accumulate(sizes, initial=cursors[0])
            return starts, (end,)
        starts, moved = [], list(cursors)
        for worker, size in enumerate(sizes):
            shard = self._shard_of(worker)
            starts.append(moved[shard])
            moved[shard] += size
        return starts, tuple(moved)

    def _shard_of(self, worker: int) -> int:
        return worker if len(self.shard_ranges) > 1 else 0

    def indices(self, position: int, count: int, shard: int = 0) -> np.ndarray:
        """Which examples stand at `count` positions of a shard."""
        start, length = self.shard_ranges[shard]
        found = []
        while count > 0:
            epoch, first = divmod(position, length)
            rows = self._order(shard, epoch)[first : first + count]
            found.append(rows + start if start else rows)
            position, count = position + len(found[-1]), count - len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, int), *found])

    def _order(self, shard: int, epoch: int) -> np.ndarray:
        order = self._orders.get((shard, epoch))
        if order is None:
            # Philox numbers 2**256 blocks from a counter on: shards start where no other gets to.
            philox = np.random.Philox(key=[self.seed & (2**63 - 1), epoch], counter=[0, 0, 0, shard])
            order = self._orders[shard, epoch] = np.random.Generator(philox).permutation(
                self.shard_ranges[shard].length
            )
            self._orders.pop((shard, epoch - 2), None)
        return order

    def checkpoint(self) -> int | np.ndarray:
        """The cursor, or one for each shard."""
        return self.cursors[0] if len(self.shard_ranges) == 1 else np.array(self.cursors)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
