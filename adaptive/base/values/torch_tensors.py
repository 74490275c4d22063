"""PyTorch's tensors as numpy arrays, without importing torch: a program that passes a tensor has imported it."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

# Dtypes that numpy has from ml_dtypes and torch cannot export: passed on as integers of the same bits.
_BITS = {"bfloat16": "int16", **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), "uint8")}
_BITS |= dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), "uint8")


def is_tensor(value: object) -> bool:
    """Return whether `value` is a `torch.Tensor`, or of a class derived from it."""
    return _is_tensor_class(type(value))  # type: ignore[arg-type]  # mypy: a class is not hashable


@lru_cache(maxsize=1024)
def _is_tensor_class(cls: type) -> bool:
    return any(c.__name__ == "Tensor" and c.__module__.partition(".")[0] == "torch" for c in cls.__mro__)


def numpy_of_tensor(tensor: Any) -> np.ndarray:
    """Return a tensor's numbers as a numpy array of the same dtype; shares the tensor's memory where that is possible.

    Tensors that require gradients are detached; those on another device are copied from it.

    Raises:
      ValueError: the tensor has no numbers in memory (sparse, nested, on the device "meta"), or numpy lacks its dtype.
        The message continues a sentence whose subject is the tensor.
    """
    with suppress(TypeError, RuntimeError):
        return tensor.numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if name not in _BITS:
            return tensor.numpy()
        return tensor.view(getattr(sys.modules["torch"], _BITS[name])).numpy().view(jnp.dtype(name))
    except (TypeError, RuntimeError) as error:  # NotImplementedError is one too
        why = str(error).partition("\n")[0]
        raise ValueError(f"cannot be read as an array of {name}: {why}") from error
