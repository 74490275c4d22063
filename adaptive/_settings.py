"""JAX's settings, taken from one thread to another: what `with jax.enable_x64(True):` sets holds in its own alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax

# Those that decide what a driver is traced and compiled to, and how wide its data are.
_SETTINGS: dict[str, Callable[[Any], AbstractContextManager]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
}


def settings_here() -> Callable[[], AbstractContextManager[None]]:
    """A context manager that gives whichever thread enters it the settings of this one, as they are now."""
    wanted = {name: getattr(jax.config, name) for name in _SETTINGS}

    @contextmanager
    def there() -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in wanted.items():
                if getattr(jax.config, name) != value:
                    stack.enter_context(_SETTINGS[name](value))
            yield

    return there
