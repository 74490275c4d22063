"""Two-byte number formats of `all_reduce`, and compressed ones.

Compressed are blocks of numbers, encoded in a few bits each. A vector is cut into blocks. A block is sent as a float32
factor and a small integer (code) per number; its values are proportional to the factor. To weight a block, multiply its
factor: the codes stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from adaptive.base.reductions import Sliced
from adaptive.operators.sources import GLOBAL_BATCH, read
from collectives._leaves import error

BLOCK = 2048  # numbers that share a scale: its four bytes are 0.8 % of 2048 codes of two bits
_NUMBER = 4  # bytes of single precision

# The four numbers that best represent a normal distribution of variance 1 (Max 1960, "Quantizing for minimum
# distortion", table I), and the boundary between the two positive ones.
_SMALL, _LARGE, _BOUNDARY = 0.4528, 1.5104, 0.9816

C = TypeVar("C", bound="Codec")


class Coded(NamedTuple):
    """Encoded blocks."""

    factors: jax.Array  # shape=(blocks, 1), float32: values are proportional to them
    codes: jax.Array  # shape=(blocks, bytes), uint8


@dataclass(frozen=True)
class Codec:
    """A format for blocks of numbers.

    Attributes:
      block: numbers in a block.
    """

    block: int = BLOCK

    @property
    def code_bytes(self) -> int:
        """Bytes of codes per block."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        """Bytes of a block on the wire."""
        return _NUMBER + self.code_bytes

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Coded:
        """Encode blocks. Traced.

        Args:
          x: shape=(blocks, block), finite.
          key: PRNG key for stochastic rounding; `None` rounds to the nearest.
        """
        raise NotImplementedError

    def decode(self, coded: Coded, dtype: Any = np.float32) -> jax.Array:
        """Return the values of encoded blocks; shape=(blocks, block)."""
        raise NotImplementedError

    def blocks(self, vector: jax.Array) -> jax.Array:
        """Reshape a vector into blocks, and pad the last one with zeros; shape=(blocks, block)."""
        return jnp.pad(vector, (0, -vector.size % self.block)).reshape(-1, self.block)

    def fitted(self: C, size: int) -> C:
        """Return this format with blocks no longer than a vector of `size` numbers."""
        return replace(self, block=min(self.block, -(-size // 8) * 8))

    def to_rows(self, coded: Coded, weight: Any = None) -> jax.Array:
        """Serialize encoded blocks, multiplied by `weight`; shape=(blocks, row_bytes), uint8."""
        factors = coded.factors if weight is None else coded.factors * jnp.asarray(weight, np.float32)
        packed = jax.lax.bitcast_convert_type(factors, np.uint8).reshape(len(factors), _NUMBER)
        return jnp.concatenate([packed, coded.codes], 1)

    def of_rows(self, rows: jax.Array) -> Coded:
        """Deserialize encoded blocks: the inverse of `to_rows`."""
        factors = jax.lax.bitcast_convert_type(rows[:, :_NUMBER].reshape(-1, 1, _NUMBER), np.float32)
        return Coded(factors, rows[:, _NUMBER:])


@dataclass(frozen=True)
class Uniform(Codec):
    """Evenly spaced values from -m to m, zero included, where m is the largest magnitude of the block."""

    bits: int = 8

    @property
    def code_bytes(self) -> int:
        return self.block * self.bits // 8

    @property
    def levels(self) -> int:
        """The number of positive values."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Coded:
        factors = (jnp.abs(x).max(1, keepdims=True) / self.levels).astype(np.float32)
        scaled = jnp.where(factors > 0, x / factors.astype(x.dtype), 0)
        rounded = jnp.round(scaled) if key is None else jnp.floor(scaled + jax.random.uniform(key, x.shape, x.dtype))
        numbers = jnp.clip(rounded, -self.levels, self.levels) + self.levels
        return Coded(factors, pack(numbers.astype(np.uint8), self.bits))

    def decode(self, coded: Coded, dtype: Any = np.float32) -> jax.Array:
        numbers = unpack(coded.codes, self.bits, self.block).astype(np.int32) - self.levels
        return numbers.astype(dtype) * coded.factors.astype(dtype)


@dataclass(frozen=True)
class TwoBits(Codec):
    """Four values per block: a small and a large magnitude, of either sign.

    Their ratio is optimal for a normal distribution. When rounding to the nearest, the factor minimizes the square
    error, so encoding decoded values gives the same codes.
    """

    @property
    def code_bytes(self) -> int:
        return self.block // 4

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Coded:
        # Scaled to at most 1, so that squares do not overflow.
        largest = jnp.abs(x).max(1, keepdims=True)
        unit = jnp.where(largest > 0, x / largest, 0)
        spread = jnp.sqrt((unit * unit).mean(1, keepdims=True))
        scaled = jnp.where(spread > 0, unit / spread, 0)
        if key is not None:
            factors = (spread * largest).astype(np.float32)
            return Coded(factors, pack(_between(scaled, jax.random.uniform(key, x.shape, x.dtype)), 2))
        numbers = jnp.where(scaled < 0, 2, 0) + jnp.where(jnp.abs(scaled) > _BOUNDARY, 1, 0)
        values = _four(numbers, x.dtype)
        factors = (unit * values).sum(1, keepdims=True) / (values * values).sum(1, keepdims=True)
        return Coded((factors * largest).astype(np.float32), pack(numbers.astype(np.uint8), 2))

    def decode(self, coded: Coded, dtype: Any = np.float32) -> jax.Array:
        return _four(unpack(coded.codes, 2, self.block), dtype) * coded.factors.astype(dtype)


def _four(numbers: jax.Array, dtype: Any) -> jax.Array:
    """Return the values of two-bit codes: bit 1 is the sign, bit 0 the magnitude."""
    return jnp.asarray([_SMALL, _LARGE, -_SMALL, -_LARGE], dtype)[numbers]


def _between(scaled: jax.Array, noise: jax.Array) -> jax.Array:
    """Round at random to one of the adjacent values, and return two-bit codes; unbiased up to the largest magnitude."""
    edges, codes = jnp.asarray([-_LARGE, -_SMALL, _SMALL, _LARGE], scaled.dtype), jnp.asarray([3, 2, 0, 1], np.uint8)
    clipped = jnp.clip(scaled, -_LARGE, _LARGE)
    below = (clipped >= -_SMALL).astype(np.int32) + (clipped >= _SMALL).astype(np.int32)
    share = (clipped - edges[below]) / (edges[below + 1] - edges[below])
    return codes[below + (noise < share).astype(np.int32)]


def pack(numbers: jax.Array, bits: int) -> jax.Array:
    """Pack rows of integers below 2^bits into bytes, lowest first; shape=(rows, ceil(columns * bits / 8)), uint8.

    `bits` divides 8.
    """
    rows, columns = numbers.shape
    if bits == 8:
        return numbers.astype(np.uint8)
    each = 8 // bits
    padded = jnp.pad(numbers.astype(np.uint8), ((0, 0), (0, -columns % each))).reshape(rows, -1, each)
    return (padded << jnp.arange(0, 8, bits, dtype=np.uint8)[None, None]).sum(2, dtype=np.uint8)


def unpack(packed: jax.Array, bits: int, columns: int) -> jax.Array:
    """Unpack integers: the inverse of `pack`; shape=(rows, columns)."""
    if bits == 8:
        return packed[:, :columns]
    apart = packed[:, :, None] >> jnp.arange(0, 8, bits, dtype=np.uint8)[None, None] & np.uint8(2**bits - 1)
    return apart.reshape(len(packed), packed.shape[1] * (8 // bits))[:, :columns]


NAMED: dict[str, Codec] = {"8bit": Uniform(bits=8), "4bit": Uniform(bits=4), "2bit": TwoBits()}


def codec_of(wire: Any) -> Codec | None:
    """Return the codec for `wire=`, or None if `wire` is not a compressed format."""
    return NAMED.get(wire) if isinstance(wire, str) else None


Rounding = Literal["nearest", "stochastic", "error_feedback"]
Wire = DTypeLike  # "8bit", "4bit" and "2bit" are strings, as names of dtypes are
_FORMATS = ("bfloat16", "float16")
_LOW_BITS = 16  # bits of a single-precision number that bfloat16 drops


@dataclass(frozen=True)
class Narrow(Sliced):
    """Sum of values that are sent in a two-byte format and added in single precision."""

    format: str
    stochastic: bool = False

    adds_up = True
    elementwise = True
    is_sum = True

    def wire_dtype(self, dtype: np.dtype) -> np.dtype:
        return jnp.dtype(self.format)

    def weight_of(self, examples: jax.Array) -> jax.Array:
        """Return a mean's weight for `examples`, for float16 relative to the global batch, to avoid overflow."""
        if self.format != "float16":
            return examples
        return examples / read(GLOBAL_BATCH).astype(examples.dtype)

    def sent(self, x: jax.Array, step: Any, worker: Any) -> jax.Array:
        return self._rounded(x.astype(jnp.float32), step, worker, 0)

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        return self._rounded(rows.astype(jnp.float32).sum(0), step, number, 1)

    def _rounded(self, x: jax.Array, step: Any, place: Any, way: int) -> jax.Array:
        if not self.stochastic:
            return x.astype(self.format)
        key = key_of(way, step, place)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        moved = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
        rounded = jax.lax.bitcast_convert_type(moved >> _LOW_BITS << _LOW_BITS, jnp.float32)
        return jnp.where(jnp.isfinite(x), rounded, x).astype(self.format)  # where not finite: unrounded


def key_of(way: int, *numbers: Any) -> jax.Array:
    """Return a PRNG key for stochastic rounding; `way` and `numbers` distinguish the uses within a step."""
    return reduce(jax.random.fold_in, numbers, jax.random.key(way))


def check_format(what: str, wire: Any, rounding: Any, dtypes: Sequence[Any] = ()) -> None:
    """Check that values of these dtypes can be sent in the format `wire`.

    Raises:
      CollectiveError: by the operator `what`: the format or the rounding is not supported, or not with each other or
        with a dtype.
    """
    try:
        name = wire if codec_of(wire) else jnp.dtype(wire).name
    except TypeError:
        name = repr(wire)
    if name not in (*_FORMATS, *NAMED):
        text = 'Use jnp.bfloat16, jnp.float16, "8bit", "4bit" or "2bit".'
        raise error(what, f"wire={name} is not a supported format. {text}")
    if rounding not in get_args(Rounding):
        raise error(what, f"rounding= must be 'nearest', 'stochastic' or 'error_feedback'; got {rounding!r}.")
    if rounding != "nearest" and name == "float16":
        raise error(what, f"rounding={rounding!r} needs wire=jnp.bfloat16 or bits, not float16.")
    if rounding == "error_feedback" and name == "bfloat16":
        raise error(what, 'rounding="error_feedback" is for bits, as  wire="4bit"; for bfloat16 "stochastic" serves.')
    for dtype in dtypes:
        if not jnp.issubdtype(dtype, jnp.floating):
            text = f"wire={name} of {dtype}: only real floats are supported. Reduce such leaves in another call."
            raise error(what, text)
