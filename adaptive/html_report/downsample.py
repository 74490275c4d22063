"""Downsample a series for a chart: bins of steps, with the minimum, median and maximum of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BINS = 500  # about two pixels per bin on a wide screen


class Bins(NamedTuple):
    """Bins of rows: bin i has the rows from `begins[i]` up to `begins[i + 1] - 1`.

    Attributes:
      begins: the first row of each bin; shape=(bins,), the first is 0.
      rows: the number of rows.
    """

    begins: np.ndarray
    rows: int

    @classmethod
    def of(cls, rows: int, most: int = BINS) -> Bins:
        """Return `most` bins of nearly equal size, or a bin per row if there are fewer rows."""
        return cls(np.unique(np.linspace(0, rows, min(rows, most), endpoint=False).astype(int)), rows)

    @property
    def counts(self) -> np.ndarray:
        """Number of rows of each bin; shape=(bins,)."""
        return np.diff(np.append(self.begins, self.rows))

    @property
    def last(self) -> np.ndarray:
        """Last row of each bin; shape=(bins,)."""
        return self.begins + self.counts - 1

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of each bin without NaN; NaN if all are. shape=(bins, …)."""
        known = np.isfinite(values)
        count = np.add.reduceat(known.astype(np.int32), self.begins, axis=0)
        total = np.add.reduceat(np.where(known, values, 0), self.begins, axis=0, dtype=np.float64)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def least(self, values: np.ndarray) -> np.ndarray:
        """Return the minimum of each bin without NaN; shape=(bins, …)."""
        return np.fmin.reduceat(values, self.begins, axis=0)

    def most(self, values: np.ndarray) -> np.ndarray:
        """Return the maximum of each bin without NaN; shape=(bins, …)."""
        return np.fmax.reduceat(values, self.begins, axis=0)

    def middle(self, values: np.ndarray) -> np.ndarray:
        """Return the median of each bin without NaN; shape=(bins, …)."""
        if (self.counts == 1).all():
            return np.asarray(values, np.float64)
        ordered = [np.sort(part, axis=0) for part in np.split(values, self.begins[1:])]
        return np.array([_middle(part) for part in ordered], np.float64)


def _middle(ordered: np.ndarray) -> np.ndarray:
    """Return the median of each sorted column; NaNs come last."""
    count = np.isfinite(ordered).sum(0)
    lower, upper = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, np.maximum(count - 1, 0))
    if ordered.ndim == 1:
        return (ordered[lower] + ordered[upper]) / 2
    columns = np.arange(ordered.shape[1])
    return (ordered[lower, columns] + ordered[upper, columns]) / 2


def corners(rows: np.ndarray, values: np.ndarray, end: int, most: int = 4 * BINS) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of a piecewise constant series, exact unless there are more than `most` changes.

    Args:
      rows: the rows where the value changes, the first row included; shape=(c,).
      values: the value from each of these rows on; shape=(c,).
      end: the last row of the chart.
      most: the largest number of changes that is kept.

    Returns:
      Rows and values, with the last value repeated at `end`. Of more than `most` changes, the least and the greatest
      value within each bin are kept.
    """
    keep = np.concatenate([[True], values[1:] != values[:-1]])
    rows, values = rows[keep], values[keep]
    if len(rows) > most:
        begins = Bins.of(len(rows), most // 2).begins
        parts = np.split(np.arange(len(rows)), begins[1:])
        places = sorted(
            {int(part[f(values[part])]) for part in parts for f in (np.argmin, np.argmax)} | {len(rows) - 1}
        )
        rows, values = rows[places], values[places]
    return np.append(rows, end), np.append(values, values[-1])
