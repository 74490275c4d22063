"""How often `balance` computes a new split when the last computations found none that is better."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MORE = 1.25  # times the gain that was out of reach: this much more is searched for at once
MOST_WAIT = 16  # decisions


class Search(NamedTuple):
    """The latest searches that found no better split. A pytree of arrays; methods return a new one.

    A search costs milliseconds of Python on a slow core. Where a worker is a few percent slower than the others, but
    every better split takes more microbatches than it saves, each decision would search in vain. So after a search in
    vain the policy lets 1, 3, 7, 15 and then always 16 decisions pass, unless the sizes change or more can be gained.
    """

    sizes: np.ndarray  # shape=(n,), int64: the split in force at the latest search in vain; all 0 before the first
    gain: np.ndarray  # shape=(), the relative gain that was in reach if sizes were real numbers and calls free
    wait: np.ndarray  # shape=(), int64: decisions until the next search
    patience: np.ndarray  # shape=(), int64: what `wait` was set to last

    @classmethod
    def init(cls, n_workers: int) -> Search:
        """Return the state before the first search."""
        return cls(np.zeros(n_workers, np.int64), np.asarray(0.0), np.asarray(0), np.asarray(0))

    def skips(self, sizes: np.ndarray, gain: float) -> bool:
        """Whether a search for a better split than `sizes` would be in vain once more, as far as one can know.

        Args:
          sizes: shape=(n,), int64.
          gain: the relative gain that is in reach if sizes are real numbers and calls are free.
        """
        return bool(self.wait > 0 and gain <= MORE * self.gain and self.sizes.tolist() == sizes.tolist())

    def skipped(self) -> Search:
        """Count a decision without a search."""
        return self._replace(wait=self.wait - 1)

    def in_vain(self, sizes: np.ndarray, gain: float) -> Search:
        """Count a search that found no better split than `sizes`; arguments as in `skips`."""
        again = self.sizes.tolist() == sizes.tolist() and gain <= MORE * self.gain
        patience = np.asarray(min(2 * int(self.patience) + 1, MOST_WAIT) if again else 1)
        return Search(sizes.astype(np.int64), np.asarray(gain), patience, patience)
