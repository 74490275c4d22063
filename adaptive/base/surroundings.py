"""What surrounds a call without being an argument of it: taken from one thread to another, or kept out.

Context variables, JAX's settings (`with jax.enable_x64(True):` holds in its own thread alone), and the interceptors of
flax's modules. A driver is traced in several threads, and what it computes must not depend on which. And where the
user has JAX watch over his own code, what this library does itself is not meant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import wraps
from operator import attrgetter
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

# Settings with which JAX watches over a user's code, and what each is while this library's own is at work: segments are
# compiled ahead of time for one device, are given arrays of the host, and seconds that are not known are NaN.
_WATCHES: dict[str, tuple[Any, Callable[[Any], AbstractContextManager]]] = {
    "jax_disable_jit": (False, jax.disable_jit),
    "jax_debug_nans": (False, jax.debug_nans),
    "jax_debug_infs": (False, jax.debug_infs),
    "jax_transfer_guard": ("allow", jax.transfer_guard),
    "jax_transfer_guard_host_to_device": ("allow", jax.transfer_guard_host_to_device),
    "jax_transfer_guard_device_to_host": ("allow", jax.transfer_guard_device_to_host),
    "jax_transfer_guard_device_to_device": ("allow", jax.transfer_guard_device_to_device),
}


_VALUE = attrgetter("value")
_ASKED_BY_OBJECT = (
    *("enable_x64", "debug_nans", "debug_infs"),
    *("transfer_guard_host_to_device", "transfer_guard_device_to_host", "transfer_guard_device_to_device"),
)  # jax.transfer_guard, and the setting of that name, set all three


def _states() -> tuple[Any, ...]:
    """Return the objects of settings that `hold_here` depends on; none where this version of JAX has them otherwise.

    Reading a setting by its name costs a call in Python; the object's `value` costs none.
    """
    found = tuple(getattr(jax, name, None) for name in _ASKED_BY_OBJECT)
    return found if all(hasattr(state, "value") for state in found) else ()


_STATES = _states()


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


def settings_in_words() -> dict[str, str]:
    """The settings of this thread that decide what a driver computes, by name."""
    return {name: repr(getattr(jax.config, name)) for name in _SETTINGS}


class Surroundings:
    """What surrounds the place where this is made; `run` calls a function there, in whichever thread."""

    def __init__(self) -> None:
        self._context, self._settings, self._interceptors = copy_context(), settings_here(), _interceptors()
        self._wide = jax.config.jax_enable_x64
        self._held: object = (
            None  # values of the settings under which compiled programs were last seen to run as they are
        )

    def run(self, function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Call a function as if from there. Nothing that it sets for its surroundings stays."""

        def there() -> R:
            with ExitStack() as stack:
                stack.enter_context(self.settings())
                known = _interceptors()
                for interceptor in self._interceptors if known != self._interceptors else ():
                    stack.enter_context(sys.modules["flax.linen"].intercept_methods(interceptor))
                return function(*args, **options)

        return self._context.copy().run(there)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """JAX's settings from there, for this thread; and nothing watched over."""
        with self._settings(), _unwatched():
            yield

    def hold_here(self) -> bool:
        """Return whether programs that were compiled there run here as they are. Asked in every step."""
        settings = *map(_VALUE, _STATES), jax.config.jax_disable_jit, jax.sharding.get_abstract_mesh()
        if settings == self._held and _STATES:
            return True
        holds = jax.config.jax_enable_x64 == self._wide and not _is_watched()
        self._held = settings if holds else None
        return holds


def as_made(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """For methods of what has `_surroundings`: JAX's settings are those under which it was made."""

    @wraps(method)
    def as_there(self: Any, *args: P.args, **options: P.kwargs) -> R:
        if self._surroundings.hold_here():
            return method(self, *args, **options)
        with self._surroundings.settings():
            return method(self, *args, **options)

    return as_there


def _interceptors() -> list[Any]:
    """What `flax.linen.intercept_methods` has in force, the outermost first; flax keeps it for each thread."""
    module = sys.modules.get("flax.linen.module")
    return list(getattr(module, "_global_interceptor_stack", ()))[::-1]


def unwatched(function: Callable[P, R]) -> Callable[P, R]:
    """For this library's own work: what JAX watches over by the user's wish, it does not watch over here."""

    @wraps(function)
    def at_work(*args: P.args, **options: P.kwargs) -> R:
        if not _is_watched():
            return function(*args, **options)
        with _unwatched():
            return function(*args, **options)

    return at_work


def _is_watched() -> bool:
    config, allowed = jax.config, (None, "allow")
    return (
        config.jax_debug_nans
        or config.jax_debug_infs
        or config.jax_disable_jit
        or config.jax_transfer_guard not in allowed
        or config.jax_transfer_guard_host_to_device not in allowed
        or config.jax_transfer_guard_device_to_host not in allowed
        or config.jax_transfer_guard_device_to_device not in allowed
        or not jax.sharding.get_abstract_mesh().empty
    )


@contextmanager
def _unwatched() -> Iterator[None]:
    with ExitStack() as stack:
        for name, (wanted, setting) in _WATCHES.items():
            if getattr(jax.config, name) not in (None, wanted):
                stack.enter_context(setting(wanted))
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(None))
        yield
