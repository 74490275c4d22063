"""JAX's persistent compilation cache, shared by the ranks of one host unless the user has configured another."""

from __future__ import annotations

import fcntl
import os
import platform
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax

_MIN_COMPILE_SECONDS = 0.1  # reading an entry back takes 20 ms
_FOLDER = "adaptive-dataflow"
_LOOK_SECONDS, _MOST_SECONDS = 0.02, 60.0


class CompilationCacheWarning(UserWarning):
    """JAX's persistent compilation cache cannot be used."""


def share_compilations() -> None:
    """Enable the cache for this process, in a folder of this user on this host.

    Does nothing if a folder is configured already, or the cache is disabled (`JAX_ENABLE_COMPILATION_CACHE=0`).
    CPU kernels contain instructions of their machine, so hosts with a common home directory do not share entries.
    Entries are executed, so the folder must not be writable for other users.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # ignored if it is relative, as XDG specifies
        folder = (base if base.is_absolute() else Path.home() / ".cache") / _FOLDER / platform.node()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # no writable home directory: every rank compiles by itself
        return
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        warnings.warn(
            f"compiled programs are not shared between ranks and runs, because others may write to {folder}. Make the "
            "folder private (chmod 700), or set JAX_COMPILATION_CACHE_DIR to another one.",
            CompilationCacheWarning,
            stacklevel=3,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)


@contextmanager
def one_compiles(name: str) -> Iterator[None]:
    """Wait while another process of this host compiles a program of this name, which is then in the cache. A context
    manager.

    Ranks start to compile the same programs at the same moment; on shared cores each would compile all of them. The
    system releases the lock if a process dies. The wait for a stopped process is limited.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or Path(folder).parent.name != _FOLDER:  # no lock files are written to a user's own folder
        yield
        return
    with ExitStack() as stack:
        with suppress(OSError):
            path = Path(folder) / f".{name}.lock"
            lock = stack.enter_context(path.open("w"))
            stack.callback(path.unlink, missing_ok=True)
            until = time.monotonic() + _MOST_SECONDS
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_LOOK_SECONDS)
        yield
