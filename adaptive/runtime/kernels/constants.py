"""Arrays that a driver closes over, with one copy per device that reads them."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from adaptive.base.values.arrays import numbers_of


class Constants:
    """Copies of arrays on devices, shared by content. They live as long as a program uses them.

    A driver is traced for every size, and each trace may create another array with the same content.
    """

    def __init__(self) -> None:
        self._copies: weakref.WeakValueDictionary[tuple, jax.Array] = weakref.WeakValueDictionary()

    def on(self, device: jax.Device | Sharding, value: Any) -> jax.Array:
        """Return a copy of `value` on a device, or on all of a mesh, in memory that is never modified."""
        if isinstance(value, jax.Array):
            content = numbers_of(value)
        else:
            content = np.array(value)  # `device_put` may share a numpy array's memory, which the user may modify
            value = content
        digest = hashlib.blake2b(np.ascontiguousarray(content).reshape(-1).view(np.uint8).data, digest_size=16)
        key = (device, str(value.dtype), value.shape, getattr(value, "weak_type", False), digest.digest())
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = jax.device_put(value, device)
        return copy
