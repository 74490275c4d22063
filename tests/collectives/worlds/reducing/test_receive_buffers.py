"""Receive buffers of a message, and the arrays that alias them."""

from __future__ import annotations

import jax
import numpy as np

from adaptive.base.channel import PartSpec
from collectives.worlds.reducing.receive_buffers import (
    Aliases,
    allocated,
)
from collectives.worlds.transport.mpi_channel import ReduceByMPI

F32 = np.dtype(np.float32)
LAYOUT = [PartSpec((5,), F32, "sum"), PartSpec((3, 7), np.dtype(np.int8), "max"), PartSpec((), F32, "min")]


def test_what_arrives_is_on_every_device():
    buffers, devices = allocated(LAYOUT), jax.local_devices()
    for number, buffer in enumerate(buffers):
        assert (buffer.shape, buffer.dtype) == LAYOUT[number][:2]
        assert buffer.ctypes.data % 64 == 0
        buffer[...] = number + 1
    made = Aliases(buffers)
    aliases = made.on(devices[:1])[0]
    assert [x.unsafe_buffer_pointer() for x in aliases] == [buffer.ctypes.data for buffer in buffers]
    for where in (devices[:1], devices[1:2], devices[:3], devices[2:0:-1]):
        for device, row in zip(where, made.on(where), strict=True):
            assert [x.shape for x in row] == [spec.shape for spec in LAYOUT]
            assert {x.device for x in row} == {device}
            assert [np.unique(x).tolist() for x in row] == [[1], [2], [3]]
    aliases[0].delete()
    again = made.on(devices[:1])[0]
    assert again[0].tolist() == [1] * 5
    assert [x is y for x, y in zip(again, aliases, strict=True)] == [False, True, True]


def test_layouts_that_differ_have_other_numbers():
    specs = [PartSpec((n,), dtype, op) for n in (5, 6) for dtype in (F32, np.dtype(int)) for op in ("sum", "max")]
    made = [ReduceByMPI(None, (spec,), status) for spec in specs for status in (0, 1)]
    assert len({one.kind for one in made}) == len({one.text for one in made}) == 16
    assert made[0].text == "sum float32[5]; status 0"
