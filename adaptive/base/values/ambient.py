"""The ambient context of a call: context variables and JAX's settings.

A driver is traced in several threads, and the result must not depend on which. JAX's settings (`with
jax.enable_x64(True):`) and context variables hold for one thread only, so the context in which a program was built is
kept and entered again. The library's own work runs without the debug checks that the user has turned on for their code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

# Settings that decide what a driver is traced and compiled to, and how wide its data are.
_SETTINGS: dict[str, Callable[[Any], AbstractContextManager]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_enable_custom_prng": jax.enable_custom_prng,
    "jax_legacy_prng_key": jax.legacy_prng_key,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_softmax_custom_jvp": jax.softmax_custom_jvp,
    "jax_debug_key_reuse": jax.debug_key_reuse,
}

# Debug checks of JAX, with the value of each while the library's own code runs: segments are compiled ahead of time for
# one device and take arrays of the host, and unknown seconds are NaN, so the checks would fail.
_DEBUG_CHECKS: dict[str, tuple[Any, Callable[[Any], AbstractContextManager]]] = {
    "jax_disable_jit": (False, jax.disable_jit),
    "jax_debug_nans": (False, jax.debug_nans),
    "jax_debug_infs": (False, jax.debug_infs),
    "jax_transfer_guard": ("allow", jax.transfer_guard),
    "jax_transfer_guard_host_to_device": ("allow", jax.transfer_guard_host_to_device),
    "jax_transfer_guard_device_to_host": ("allow", jax.transfer_guard_device_to_host),
    "jax_transfer_guard_device_to_device": ("allow", jax.transfer_guard_device_to_device),
}


def current_settings() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that applies this thread's current settings to the thread that enters it."""
    wanted = {name: getattr(jax.config, name) for name in _SETTINGS}

    @contextmanager
    def there() -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in wanted.items():
                if getattr(jax.config, name) != value:
                    stack.enter_context(_SETTINGS[name](value))
            yield

    return there


def describe_settings() -> dict[str, str]:
    """Return the settings of this thread that affect what a driver computes, as text by name."""
    return {name: repr(getattr(jax.config, name)) for name in _SETTINGS}


class AmbientContext:
    """The ambient context of the place where this object is created; `run` calls a function in it, in any thread."""

    def __init__(self) -> None:
        self._context, self._settings = copy_context(), current_settings()
        self._wide = jax.config.jax_enable_x64

    def run(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a function in this context. Context variables that the function sets are discarded."""

        def there() -> R:
            with self.settings():
                return function(*args, **options)

        return self._context.copy().run(there)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Apply JAX's settings of this context to the current thread, with debug checks off."""
        with self._settings(), _without_debug_checks():
            yield

    def matches_here(self) -> bool:
        """Return whether the calling thread has the x64 setting of the build and no debug checks on.

        If so, compiled segments can be called directly.
        """
        return jax.config.jax_enable_x64 == self._wide and not _has_debug_checks()


def with_build_settings(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a method of an object with `_ambient`: call it under the settings of the build."""

    @wraps(method)
    def as_there(self: Any, *args: P.args, **options: P.kwargs) -> R:
        if self._ambient.matches_here():
            return method(self, *args, **options)
        with self._ambient.settings():
            return method(self, *args, **options)

    return as_there


def without_debug_checks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the library: call it with JAX's debug checks off."""

    @wraps(function)
    def at_work(*args: P.args, **options: P.kwargs) -> R:
        if not _has_debug_checks():
            return function(*args, **options)
        with _without_debug_checks():
            return function(*args, **options)

    return at_work


def _has_debug_checks() -> bool:
    asked = any(getattr(jax.config, name) not in (None, wanted) for name, (wanted, _) in _DEBUG_CHECKS.items())
    return asked or not jax.sharding.get_abstract_mesh().empty


@contextmanager
def _without_debug_checks() -> Iterator[None]:
    with ExitStack() as stack:
        for name, (wanted, setting) in _DEBUG_CHECKS.items():
            if getattr(jax.config, name) not in (None, wanted):
                stack.enter_context(setting(wanted))
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(None))
        yield
