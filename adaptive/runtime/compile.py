"""From a function to a program for one device, that is known to be what it was compiled from."""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Callable
from typing import Any

import jax

from adaptive.base.jaxprs import give_name, names_of, text_of

from .cache import CompilationCacheWarning
from .ending import uninterruptible


def compile_segment(
    function: Callable, shapes: Any, device: jax.Device, *, name: str = "segment", donate: bool = False
) -> Callable:
    """Compile ahead of time, for one device.

    The program is named for what it computes, `name` and a digest: that is what profiles show. A cached program carries
    its name too, so one that lies in the cache under another's key is found out, and compiled anew.

    Args:
      function: of pytrees of arrays.
      shapes: of its arguments.
      donate: whether the memory of the first argument may be given to results.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    given_up = (0,) if donate else ()
    compiled, title = _compile(jax.jit(function, donate_argnums=given_up).lower(*placed), name)
    if not _is_called(title, compiled):
        warnings.warn(
            f"the compilation cache in {jax.config.jax_compilation_cache_dir} holds another program under the name of "
            f"{title}; it is not used. Remove that folder.",
            CompilationCacheWarning,
            stacklevel=2,
        )
        afresh = jax.jit(lambda *args: function(*args), donate_argnums=given_up).lower(*placed)
        compiled, _ = _compile(afresh, f"{name}_{secrets.token_hex(4)}")  # a name that no cache knows
    return compiled


def _compile(lowered: Any, name: str) -> tuple[Any, str]:
    title = f"{name}_{hashlib.blake2b(text_of(lowered).encode(), digest_size=8).hexdigest()}"
    give_name(lowered, title)
    with uninterruptible():
        return lowered.compile(), title


def _is_called(title: str, compiled: Any) -> bool:
    if jax.config.jax_compilation_cache_dir is None:
        return True  # it was compiled just now
    return names_of(compiled) == [title]
