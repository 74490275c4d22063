"""The ambient context of a call: context variables and JAX's settings.

A driver is traced in several threads, and the result must not depend on which. JAX's settings (`with
jax.enable_x64(True):`) and context variables hold for one thread only, so the context in which a program was built is
kept and entered again. The library's own work runs without the debug checks that the user has turned on for their code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

# Settings that decide what a driver is traced and compiled to, and how wide its data are. Of each, `jax.config` has the
# value, under this name after "jax_", and `jax` the context manager.
_SETTINGS = (
    *("enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "numpy_rank_promotion", "default_prng_impl"),
    *("enable_custom_prng", "legacy_prng_key", "threefry_partitionable", "softmax_custom_jvp", "debug_key_reuse"),
)
# Debug checks of JAX, with the value of each while the library's own code runs: segments are compiled ahead of time for
# one device and take arrays of the host, and unknown seconds are NaN, so the checks would fail.
_NO_DEBUG_CHECKS = {
    **dict.fromkeys(("disable_jit", "debug_nans", "debug_infs"), False),
    **{f"transfer_guard{to}": "allow" for to in ("", "_host_to_device", "_device_to_host", "_device_to_device")},
}


def _current(name: str) -> Any:
    return getattr(jax.config, f"jax_{name}")


@contextmanager
def _applied(settings: Mapping[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in settings.items():
            if _current(name) != value:
                stack.enter_context(getattr(jax, name)(value))
        yield


def current_settings() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that applies this thread's current settings to the thread that enters it."""
    return partial(_applied, {name: _current(name) for name in _SETTINGS})


def describe_settings() -> dict[str, str]:
    """Return the settings of this thread that affect what a driver computes, as text by name."""
    return {f"jax_{name}": repr(_current(name)) for name in _SETTINGS}


class AmbientContext:
    """The ambient context of the place where this object is created; `run` calls a function in it, in any thread."""

    def __init__(self) -> None:
        self._context, self._settings = copy_context(), current_settings()
        self._wide = jax.config.jax_enable_x64

    def run(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a function in this context. Context variables that the function sets are discarded."""
        return self._context.copy().run(self.settings()(function), *args, **options)

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
        with nullcontext() if self._ambient.matches_here() else self._ambient.settings():
            return method(self, *args, **options)

    return as_there


def without_debug_checks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the library: call it with JAX's debug checks off."""

    @wraps(function)
    def at_work(*args: P.args, **options: P.kwargs) -> R:
        with _without_debug_checks() if _has_debug_checks() else nullcontext():
            return function(*args, **options)

    return at_work


def _has_debug_checks() -> bool:
    asked = any(_current(name) not in (None, without) for name, without in _NO_DEBUG_CHECKS.items())
    return asked or not jax.sharding.get_abstract_mesh().empty


@contextmanager
def _without_debug_checks() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_applied(_NO_DEBUG_CHECKS))
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(None))
        yield
