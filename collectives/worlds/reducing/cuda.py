"""CUDA's driver, as far as MPI needs it prepared: by ctypes, since JAX has loaded it and offers none of this."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_LEGACY_IPC = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@lru_cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def is_nvidia(device: jax.Device) -> bool:
    """Whether it is a GPU that CUDA knows."""
    return device.platform != "cpu" and "cuda" in device.client.platform_version.lower()


@lru_cache
def number(device: jax.Device) -> int:
    """Of a GPU, as the driver counts them in this process: JAX may have been given some of them."""
    found = _attribute(device, _DEVICE_ORDINAL)
    return int(device.local_hardware_id) if found is None else found


@lru_cache
def can_be_mapped(device: jax.Device) -> bool:
    """Whether another process can map the memory that JAX has on a GPU, as MPI does it (cuIpcGetMemHandle): not what
    XLA allocates by cuMemCreate, which it does by default since JAX 0.11.
    """
    return bool(_attribute(device, _LEGACY_IPC))


def _attribute(device: jax.Device, which: int) -> int | None:
    """Of memory that JAX has on a device; `None` where the driver does not say."""
    x, found = jax.block_until_ready(jnp.zeros((), device=device)), ctypes.c_int(0)
    address = ctypes.c_uint64(x.unsafe_buffer_pointer())
    return None if _driver().cuPointerGetAttribute(ctypes.byref(found), which, address) else found.value


def seen(own: int) -> tuple[bytes, tuple[bytes, ...]]:
    """Names of a GPU, by its number, and of all that this process sees."""
    count = ctypes.c_int(0)
    _driver().cuDeviceGetCount(ctypes.byref(count))
    names = tuple(_uuid(i) for i in range(count.value))
    return names[own], names


def _uuid(i: int) -> bytes:
    name = ctypes.create_string_buffer(16)
    _driver().cuDeviceGetUuid_v2(name, _handle(i))
    return name.raw


def _handle(i: int) -> ctypes.c_int:
    handle = ctypes.c_int(0)
    _driver().cuDeviceGet(ctypes.byref(handle), i)
    return handle


def make_current(device: jax.Device) -> None:
    """Give this thread the context that JAX uses on a GPU, if it has none: MPI asks the driver by it, and where it
    does so in vain, it goes through the host ever after. On a CPU there is nothing to do.
    """
    if device.platform == "cpu":
        return
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    if context.value is None:
        _driver().cuCtxSetCurrent(_context(number(device)))


@lru_cache
def _context(i: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), _handle(i))
    return context


class Shareable:
    """Memory on this thread's GPU that other processes can map, beside JAX's. Kept, as they keep their maps of it."""

    def __init__(self) -> None:
        self._memory, self._nbytes = ctypes.c_uint64(0), 0
        self._stream: ctypes.c_void_p | None = None

    def room(self, nbytes: int) -> int:
        """The address of so much, the same as long as that is enough; 0 if there is none to be had."""
        if nbytes > self._nbytes:
            self.free()
            if _driver().cuMemAlloc_v2(ctypes.byref(self._memory), ctypes.c_size_t(nbytes)):
                self._memory.value = 0
                return 0
            self._nbytes = nbytes
        return self._memory.value

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """From one address on the GPU to another; returns when it is there."""
        if self._stream is None:
            self._stream = ctypes.c_void_p()
            _checked(_driver().cuStreamCreate(ctypes.byref(self._stream), _NON_BLOCKING))
        where = ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        _checked(_driver().cuMemcpyDtoDAsync_v2(*where, self._stream))
        _checked(_driver().cuStreamSynchronize(self._stream))

    def leave(self) -> None:
        """To whoever may still write into it: there will be other memory."""
        self._memory, self._nbytes = ctypes.c_uint64(0), 0

    def free(self) -> None:
        """Give it back."""
        if self._memory.value:
            _driver().cuMemFree_v2(self._memory)
        self.leave()


def _checked(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA's driver: error {error}")
