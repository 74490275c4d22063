"""Compilation of functions ahead of time, with names by which a wrong cache entry is found."""

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

    What is compiled and in use already is not compiled again: it is the same program, or, on CPUs, is loaded on this
    device as well. (On other devices the compilation cache does that; it takes CPUs for different kinds.)

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
    # What is not used is kept, so that the text of a program says all of how it is called.
    compiled, title = _compile(
        jax.jit(function, donate_argnums=given_up, keep_unused=True).lower(*placed), name, device
    )
    if not _is_called(title, compiled):
        _warn_of_another(title)
        afresh = jax.jit(lambda *args: function(*args), donate_argnums=given_up).lower(*placed)
        compiled, _ = _compile(afresh, f"{name}_{secrets.token_hex(4)}", device)  # a name that no cache knows
    return compiled


@thread_status("compiling", compiles=True)
def compile_over(
    function: Callable, shapes: Any, devices: tuple[jax.Device, ...], *, name: str, donate: tuple[int, ...]
) -> Callable:
    """Compile one program for several devices, like `compile_segment` for one.

    Args:
      shapes: of its arguments, with their shardings over the devices.
      donate: the numbers of the arguments whose memory may be given to results.
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
      Exception: what the first that failed has raised.
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
        # One program over several processes' devices is compiled by all of them together: none waits for another.
        with nullcontext() if several else one_compiles(title), uninterruptible():
            known = lowered.compile()
        if not _is_called(title, known):
            return known, title
    _programs[*key, device] = known
    return known, title


_programs: WeakValueDictionary[tuple, jax.stages.Compiled] = WeakValueDictionary()  # by what they compute, and where


def _in_use(key: tuple, device: jax.Device | tuple[jax.Device, ...]) -> jax.stages.Compiled | None:
    """Return the same program if it is in use: on this device, or loaded from another device of its kind."""
    known = _programs.get((*key, device))
    if known is not None or isinstance(device, tuple) or device.platform != "cpu":
        return known
    for other in device.client.local_devices():
        source = _programs.get((*key, other))
        if source is not None:
            with suppress(Exception):  # where XLA does not know how, it is compiled
                return loaded_on(source, device)
    return None


def _is_called(title: str, compiled: Any) -> bool:
    if jax.config.jax_compilation_cache_dir is None:
        return True  # it was compiled just now
    return names_of(compiled) == [title]
