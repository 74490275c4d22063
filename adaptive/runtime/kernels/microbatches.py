"""The rule by which a local batch runs as microbatches.

A batch runs as the fewest microbatches of compiled sizes, no larger than `microbatch=` and the memory permit. Compiled
are the powers of two (*buckets*), of which every size is composed at once, and the batch's own size if the sizes have
stayed for `OWN_KERNEL_AFTER` steps, or it is the first one.

It is a rule and not a comparison of timings, because the fewest microbatches are what an accelerator needs, where each
one more costs a launch and idle cores: an odd size of seven microbatches took five times as long as its own kernel. On
a CPU the number hardly matters, but the size does: a microbatch whose temporary arrays exceed the cache takes up to
twice as long per example. XLA reports their bytes when it compiles, so `largest_in_cache` bounds the buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

Microbatches = tuple[int, ...]

OWN_KERNEL_AFTER = 64  # steps at one size
# The cost of one more microbatch, in examples, over the steps at one size. One costs 0.7 (attention) to 28 examples (a
# perceptron) on one core, until the size has a kernel of its own.
CALL_OVERHEAD = 1.0
_CACHE_BYTES = 8 << 20  # of a core, approximately
_PASSES = 4  # a microbatch's temporaries may be this many times its gradient, which several microbatches add up


def fewest(size: int, compiled: Iterable[int], at_least: int = 1) -> Microbatches | None:
    """Return the fewest microbatches of compiled sizes that sum to `size`, largest first; `None` if none do.

    These are the size itself, powers of two, or one size, several times, and the rest.

    Args:
      size: examples in the local batch.
      compiled: sizes with kernels.
      at_least: the minimum number of microbatches, where `size` has so many examples.
    """
    top = -(-size // at_least)
    known = sorted((k for k in compiled if k <= top), reverse=True)
    found, powers, rest = list[Microbatches](), list[int](), size
    for k in known:
        if not size % k or size % k in known:
            found.append((k,) * (size // k) + (size % k,) * bool(size % k))
        if k & (k - 1) == 0:
            powers += [k] * (rest // k)
            rest %= k
    if rest == 0:
        found.insert(0, tuple(powers))  # of equally many, powers of two
    return min(found, key=len, default=None)


def by_size_alone(size: int, at_least: int, largest_microbatch: int | None, *, resizable: bool) -> Microbatches:
    """Return microbatches that do not depend on which kernels are compiled.

    Args:
      at_least: the minimum number of microbatches.
      resizable: whether they are buckets; if not, they have equal sizes, except the last one.
    """
    top = min(largest_microbatch or size, -(-size // at_least))
    if not resizable:
        return (top,) * (size // top) + ((size % top,) if size % top else ())
    found = fewest(size, [1 << i for i in range(top.bit_length())])
    assert found is not None, "one of the buckets is 1"
    return found


def missing_buckets(largest: int, largest_microbatch: int | None, buckets: Collection[int]) -> list[int]:
    """Return the buckets that a local batch of `largest` uses and that are not in `buckets`; the largest first."""
    top = min(largest, largest_microbatch or largest).bit_length()
    return [1 << i for i in reversed(range(top)) if 1 << i not in buckets]


def largest_in_cache(size: int, temporary_bytes: int, gradient_bytes: int) -> int:
    """Return the largest bucket whose temporary arrays fit a core's cache, at least 1.

    Args:
      size: examples of a kernel.
      temporary_bytes: bytes of that kernel's temporary arrays, which grow with its examples.
      gradient_bytes: bytes that each microbatch writes. If they are many, larger microbatches are worth more.
    """
    usable = max(_CACHE_BYTES, _PASSES * gradient_bytes)
    return 1 << max(0, (int(size * usable / max(temporary_bytes, 1))).bit_length() - 1)
