"""Buckets: the sizes, powers of two, of whose kernels batches of all sizes are composed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from adaptive.runtime.microbatches import GAIN, Microbatches, cheapest


def missing_buckets(largest: int, largest_microbatch: int | None, buckets: Collection[int]) -> list[int]:
    """Return the buckets that a local batch of `largest` uses and that are not in `buckets`; the largest first."""
    top = min(largest, largest_microbatch or largest).bit_length()
    return [1 << i for i in reversed(range(top)) if 1 << i not in buckets]


def coarse_buckets(buckets: Collection[int]) -> set[int]:
    """Return every second bucket from the largest down, and the bucket of one example.

    They suffice for every size, with half of the kernels and a few more microbatches.
    """
    return {*sorted(buckets, reverse=True)[::2], 1}


def larger_gains_nothing(buckets: Collection[int], measured: Sequence[Mapping[int, float]]) -> bool:
    """Return whether the largest bucket takes as long per example as the next smaller one. Larger ones gain nothing
    then.

    Args:
      measured: for each worker, the seconds by size.
    """
    if len(buckets) < 2:
        return False
    last, largest = sorted(buckets)[-2:]
    return all(largest in m and last in m and m[largest] > 2 * GAIN * m[last] for m in measured)


def by_size_alone(size: int, at_least: int, largest_microbatch: int | None, *, resizable: bool) -> Microbatches:
    """Return microbatches that depend neither on measured times nor on which kernels are compiled.

    Args:
      at_least: the minimum number of microbatches.
      resizable: whether they are buckets; if not, they have equal sizes, except the last one.
    """
    top = min(largest_microbatch or size, -(-size // at_least))
    if not resizable:
        return (top,) * (size // top) + ((size % top,) if size % top else ())
    found = cheapest(size, [1 << i for i in range(top.bit_length())], lambda k: 1.0)
    assert found is not None, "one of the buckets is 1"
    return found
