"""The functions of CUDA's driver API that sums over MPI need, called by ctypes: JAX does not expose them."""

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
    """Return whether a device is an NVIDIA GPU."""
    return device.platform != "cpu" and "cuda" in device.client.platform_version.lower()


@lru_cache
def number(device: jax.Device) -> int:
    """Return a GPU's number in the driver, which may differ from JAX's: JAX may use only some of the GPUs."""
    found = _attribute(device, _DEVICE_ORDINAL)
    return int(device.local_hardware_id) if found is None else found


@lru_cache
def can_be_mapped(device: jax.Device) -> bool:
    """Return whether other processes can map JAX's memory on a GPU as MPI does, by cuIpcGetMemHandle. They cannot map
    memory allocated by cuMemCreate, XLA's default since JAX 0.11.
    """
    return bool(_attribute(device, _LEGACY_IPC))


def _attribute(device: jax.Device, which: int) -> int | None:
    """Return an attribute of JAX's memory on a device; None if the driver does not report it."""
    x, found = jax.block_until_ready(jnp.zeros((), device=device)), ctypes.c_int(0)
    address = ctypes.c_uint64(x.unsafe_buffer_pointer())
    return None if _driver().cuPointerGetAttribute(ctypes.byref(found), which, address) else found.value


def seen(own: int) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the UUID of the GPU with the number `own`, and the UUIDs of all GPUs visible to this process."""
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
    """Make JAX's context on a GPU current in this thread, if the thread has none. MPI needs it to query the driver, and
    sends through the host from the first failure on. Does nothing on a CPU.
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
    """Memory on this thread's GPU that other processes can map; not JAX's. Reused, because they keep their mappings."""

    def __init__(self) -> None:
        self._memory, self._nbytes = ctypes.c_uint64(0), 0
        self._stream: ctypes.c_void_p | None = None

    def room(self, nbytes: int) -> int:
        """Return the address of at least `nbytes` of memory, or 0 if it cannot be allocated. The memory is reused while
        it is large enough.
        """
        if nbytes > self._nbytes:
            self.free()
            if _driver().cuMemAlloc_v2(ctypes.byref(self._memory), ctypes.c_size_t(nbytes)):
                self._memory.value = 0
                return 0
            self._nbytes = nbytes
        return self._memory.value

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy from one address on the GPU to another; returns when it is done."""
        if self._stream is None:
            self._stream = ctypes.c_void_p()
            _checked(_driver().cuStreamCreate(ctypes.byref(self._stream), _NON_BLOCKING))
        where = ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        _checked(_driver().cuMemcpyDtoDAsync_v2(*where, self._stream))
        _checked(_driver().cuStreamSynchronize(self._stream))

    def leave(self) -> None:
        """Abandon the memory without freeing it: another process may still write to it. `room` allocates new memory."""
        self._memory, self._nbytes = ctypes.c_uint64(0), 0

    def free(self) -> None:
        """Free the memory."""
        if self._memory.value:
            _driver().cuMemFree_v2(self._memory)
        self.leave()


def _checked(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA driver error {error}")
