"""The order of an epoch: a permutation that is computed index by index on demand, and never stored.

A Feistel network over pairs of numbers (Luby and Rackoff 1988; with any two radices Black and Rogaway 2002): number x
of 0 … n-1 is written as (l, r) with two radices near the square root of n, and each round adds a hash of one half to
the other half. Each round is invertible, so the network is a permutation. There are slightly more than n pairs; the
network is applied again to a result of n or more, until it is below n (cycle walking).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np

# With 16 rounds all 120 orders of five examples are equally frequent in 60,000 epochs; with 8 rounds they are not. The
# bias of a round shrinks with the number of examples.
_ROUNDS, _ROUNDS_OF_FEW, _FEW = 8, 16, 1024
_BLOCK = 4096  # indices that are permuted at once (0.1 ms), so that the overhead of NumPy calls is small
_BLOCKS_KEPT = 4

_HALF = np.uint64(32)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64


def shuffled(places: np.ndarray, length: int, keys: Sequence[np.uint64] | np.ndarray) -> np.ndarray:
    """Evaluate a pseudorandom permutation of 0 … length-1 at these indices; shape=(k,), int64.

    The length is below 2**62. The keys, one of each round and an even number of them, select the permutation.
    """
    most, left = np.uint64(length), isqrt(length - 1) + 1
    radices = np.uint64(left), np.uint64(-(-length // left))
    found = _round_trip(places.astype(np.uint64), radices, keys)
    while (beyond := found >= most).any():
        found[beyond] = _round_trip(found[beyond], radices, keys)
    return found.astype(np.int64)


def _round_trip(
    x: np.ndarray, radices: tuple[np.uint64, np.uint64], keys: Sequence[np.uint64] | np.ndarray
) -> np.ndarray:
    a, b = radices
    left, right = x // b, x % b
    for one, other in zip(keys[::2], keys[1::2], strict=True):
        left = left + (_hash(right, one) * a >> _HALF)
        left = np.minimum(left, left - a)  # modulo a: an unsigned difference below zero wraps to a huge number
        right = right + (_hash(left, other) * b >> _HALF)
        right = np.minimum(right, right - b)
    return left * b + right


def _hash(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return a 32-bit hash of each number, in uint64."""
    z = (x ^ key) * _MIX[0]
    z = (z ^ z >> _HALF) * _MIX[1]
    return z >> _HALF


class Order:
    """The order of the examples of shards of these lengths: epochs one after another, each in its own order."""

    def __init__(self, lengths: Sequence[int], seed: int):
        self._lengths, self._seed = tuple(lengths), seed & (2**63 - 1)
        self._blocks: dict[tuple[int, int, int], np.ndarray] = {}

    def examples(self, shard: int, position: int, count: int) -> np.ndarray:
        """Return the indices within a shard of the examples at `count` positions; shape=(count,)."""
        length, found = self._lengths[shard], []
        epoch, place = divmod(position, length)
        block = self._blocks.get((shard, epoch, place // _BLOCK))
        first = place % _BLOCK
        if block is not None and 0 < count <= len(block) - first:  # nearly always
            return block[first : first + count]
        while count > 0:
            epoch, place = divmod(position, length)
            number, first = divmod(place, _BLOCK)
            found.append(self._block(shard, epoch, number)[first : first + count])
            position, count = position + len(found[-1]), count - len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, np.int64), *found])

    def epochs(self, shard: int, position: int, count: int) -> np.ndarray:
        """Return the epoch of the shard to which each of these positions belongs; shape=(count,)."""
        return np.arange(position, position + count) // self._lengths[shard]

    def _block(self, shard: int, epoch: int, number: int) -> np.ndarray:
        key, length = (shard, epoch, number), self._lengths[shard]
        block = self._blocks.get(key)
        if block is None:
            # Philox has a counter of 256 bits, of which the top word is the shard: no two shards overlap.
            keys = np.random.Philox(key=[self._seed, epoch], counter=[0, 0, 0, shard]).random_raw(
                _ROUNDS_OF_FEW if length < _FEW else _ROUNDS
            )
            places = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, length))
            block = self._blocks[key] = shuffled(places, length, keys)
            while len(self._blocks) > _BLOCKS_KEPT + len(self._lengths):
                del self._blocks[next(iter(self._blocks))]
        return block
