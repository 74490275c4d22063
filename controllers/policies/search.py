"""Backoff of `balance`'s search for a better split after searches that found none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controllers.timing._batch_time import same

MORE = 1.25  # a possible gain of this many times the one of the last search is searched for at once
MOST_WAIT = 16  # decisions


class Search(NamedTuple):
    """The latest searches that found no better split. A pytree of arrays; methods return a new one.

    A search costs milliseconds of Python on a slow core. If a worker is a few percent slower than the others, but every
    better split needs more microbatches than it saves, each search fails. After a failed search the policy therefore
    skips 1, 3, 7, 15 and then always 16 decisions, unless the sizes change or a larger gain becomes possible.
    """

    sizes: np.ndarray  # shape=(n,), int64: the present split at the latest failed search; all 0 before the first
    gain: np.ndarray  # shape=(), the relative gain that was possible with real-valued sizes and no overhead
    wait: np.ndarray  # shape=(), int64: decisions until the next search
    patience: np.ndarray  # shape=(), int64: last initial value of `wait`

    @classmethod
    def init(cls, n_workers: int) -> Search:
        """Return the state before the first search."""
        return cls(np.zeros(n_workers, np.int64), np.asarray(0.0), np.asarray(0), np.asarray(0))

    def skips(self, sizes: np.ndarray, gain: float) -> bool:
        """Return whether to skip the search for a better split than `sizes`.

        Args:
          sizes: the present split; shape=(n,), int64.
          gain: the relative gain that is possible with real-valued sizes and no overhead of microbatches.
        """
        return bool(self.wait > 0 and gain <= MORE * self.gain and same(self.sizes, sizes))

    def skipped(self) -> Search:
        """Return the state after a decision without a search."""
        return self._replace(wait=self.wait - 1)

    def in_vain(self, sizes: np.ndarray, gain: float) -> Search:
        """Return the state after a search that found no better split than `sizes`; arguments as in `skips`."""
        again = same(self.sizes, sizes) and gain <= MORE * self.gain
        patience = np.asarray(min(2 * int(self.patience) + 1, MOST_WAIT) if again else 1)
        return Search(sizes.astype(np.int64), np.asarray(gain), patience, patience)
