"""Ahead-of-time compilation of functions, with names that identify wrong cache entries."""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

import jax

from adaptive.base.ambient import current_settings, without_debug_checks
from adaptive.base.jaxprs import calls_back, give_name, loaded_on, names_of, text_of
from adaptive.base.thread_status import thread_status

from .background_threads import uninterruptible
from .cache import CompilationCacheWarning, one_compiles


@thread_status("compiling", compiles=True)
def compile_segment(
    function: Callable, shapes: Any, device: jax.Device, *, name: str = "segment", donate: bool = False
) -> Callable:
    """Compile a function ahead of time for one device, and return the program.

    A program that is already compiled and in use is returned again; on CPUs it is also loaded on other devices. (On
    other platforms the compilation cache does that, but it treats CPU devices as different.)

    The program's name, which profiles show, consists of `name` and a digest of its computation. Cached programs have
    names too, so an entry under the key of another program is recognized, and the program is compiled again.

    Args:
      function: a function of pytrees of arrays.
      shapes: shapes of its arguments.
      donate: whether the memory of the first argument may be reused for results.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    given_up = (0,) if donate else ()
    # Unused arguments are kept, so that the text of a program determines its signature.
    compiled, title = _compile(
        jax.jit(function, donate_argnums=given_up, keep_unused=True).lower(*placed), name, device
    )
    if not _is_called(title, compiled):
        _warn_of_another(title)
        afresh = jax.jit(lambda *args: function(*args), donate_argnums=given_up).lower(*placed)
        compiled, _ = _compile(afresh, f"{name}_{secrets.token_hex(4)}", device)  # a name that is not in the cache
    return compiled


@thread_status("compiling", compiles=True)
def compile_over(
    function: Callable, shapes: Any, devices: tuple[jax.Device, ...], *, name: str, donate: tuple[int, ...]
) -> Callable:
    """Compile one program for several devices, like `compile_segment` for one.

    Args:
      shapes: shapes of its arguments, with their shardings over the devices.
      donate: indices of the arguments whose memory may be reused for results.
    """
    lowered = jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*shapes)
    compiled, title = _compile(lowered, name, devices)
    if not _is_called(title, compiled):
        _warn_of_another(title)
        afresh = jax.jit(lambda *args: function(*args), donate_argnums=donate, keep_unused=True).lower(*shapes)
        compiled, _ = _compile(afresh, f"{name}_{secrets.token_hex(4)}", devices)
    return compiled


@thread_status("compiling", compiles=True)
def side_by_side(jobs: Sequence[Callable[[], object]], most: int) -> None:
    """Run jobs that compile, in at most `most` threads, and wait for all. XLA uses one core for each.

    Raises:
      Exception: the error of the first job that failed.
    """
    if most == 1 or len(jobs) == 1:
        for job in jobs:
            job()
        return
    settings = current_settings()

    def there(job: Callable[[], object]) -> None:
        with settings():
            job()

    with ThreadPoolExecutor(min(most, len(jobs)), "adaptive-start") as threads:
        for done in [threads.submit(without_debug_checks(there), job) for job in jobs]:
            done.result()


def _warn_of_another(title: str) -> None:
    warnings.warn(
        f"the compilation cache in {jax.config.jax_compilation_cache_dir} holds another program under the name of "
        f"{title}; it is not used. Remove that folder.",
        CompilationCacheWarning,
        stacklevel=3,
    )


def _compile(lowered: Any, name: str, device: jax.Device | tuple[jax.Device, ...]) -> tuple[Any, str]:
    text = text_of(lowered)
    title = f"{name}_{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    give_name(lowered, title)
    key = (title, lowered.in_tree, lowered.out_tree, calls_back(text) and object())
    known = _in_use(key, device)
    if known is None:
        several = isinstance(device, tuple) and len({d.process_index for d in device}) > 1
        # A program over devices of several processes is compiled by all of them together, without waiting.
        with nullcontext() if several else one_compiles(title), uninterruptible():
            known = lowered.compile()
        if not _is_called(title, known):
            return known, title
    _programs[*key, device] = known
    return known, title


_programs: WeakValueDictionary[tuple, jax.stages.Compiled] = WeakValueDictionary()  # by computation and device


def _in_use(key: tuple, device: jax.Device | tuple[jax.Device, ...]) -> jax.stages.Compiled | None:
    """Return the same program if it is in use: on this device, or loaded from another device of its kind."""
    known = _programs.get((*key, device))
    if known is not None or isinstance(device, tuple) or device.platform != "cpu":
        return known
    for other in device.client.local_devices():
        source = _programs.get((*key, other))
        if source is not None:
            with suppress(Exception):  # compiled if XLA cannot load it
                return loaded_on(source, device)
    return None


def _is_called(title: str, compiled: Any) -> bool:
    if jax.config.jax_compilation_cache_dir is None:
        return True  # it was compiled just now
    return names_of(compiled) == [title]
