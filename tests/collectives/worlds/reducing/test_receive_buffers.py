"""Receive buffers of a message, and the arrays that alias them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive import CollectiveError
from adaptive.base.channel import PartSpec
from collectives.worlds.reducing.receive_buffers import (
    ReceiveBuffers,
    check_dtypes,
    from_keys,
    keys,
    round_to,
)

F32 = np.dtype(np.float32)
LAYOUT = [PartSpec((5,), F32, "sum"), PartSpec((3, 7), np.dtype(np.int8), "max"), PartSpec((), F32, "min")]


def test_buffers_do_not_overlap_and_are_aligned():
    made = ReceiveBuffers(LAYOUT, 0, np.zeros(10))
    for number, buffer in enumerate(made.buffers):
        assert (buffer.shape, buffer.dtype) == LAYOUT[number][:2]
        assert buffer.ctypes.data % 64 == 0
        buffer[...] = number + 1
    assert [set(buffer.reshape(-1).tolist()) for buffer in made.buffers] == [{1}, {2}, {3}]


def test_what_arrives_is_on_every_device():
    made, devices = ReceiveBuffers(LAYOUT, 0, np.zeros(10)), jax.local_devices()
    assert [made.is_default(device) for device in devices[:2]] == [True, False]
    for number, buffer in enumerate(made.buffers):
        buffer[...] = number + 1
    aliases = made.arrays(devices[:1])[0]
    assert [x.unsafe_buffer_pointer() for x in aliases] == [buffer.ctypes.data for buffer in made.buffers]
    for where in (devices[:1], devices[1:2], devices[:3], devices[2:0:-1]):
        for device, row in zip(where, made.arrays(where), strict=True):
            assert [x.shape for x in row] == [spec.shape for spec in LAYOUT]
            assert {x.device for x in row} == {device}
            assert [np.asarray(x).flat[0] for x in row] == [1, 2, 3]
    aliases[0].delete()
    again = made.arrays(devices[:1])[0]
    assert again[0].tolist() == [1] * 5
    assert [x is y for x, y in zip(again, aliases, strict=True)] == [False, True, True]


@pytest.mark.parametrize(
    ("first", "status", "in_preamble", "status_in_preamble"),
    [(9, 3, True, True), (10, 10, True, True), (11, 10, False, True), (11, 11, False, False), (11, 0, False, True)],
)
def test_part_0_and_the_status_are_in_the_preamble_if_there_is_room(first, status, in_preamble, status_in_preamble):
    room = np.zeros(10)
    made = ReceiveBuffers((PartSpec((first,), F32, "sum"),), status, room)
    assert (made.in_preamble is not None, made.status_in_preamble) == (in_preamble, status_in_preamble)
    assert made.free.size == status
    made.free[:] = 7
    where = room[:first] if status_in_preamble else made.buffers[0]
    assert where.tolist()[len(where) - status :] == [7.0] * status
    assert np.count_nonzero(room == 7) == status * status_in_preamble
    if in_preamble:
        assert made.in_preamble.tolist() == room[:first].tolist()


def test_layouts_that_differ_have_other_names():
    room = np.zeros(10)
    parts = [(5,), (6,)], [F32, np.dtype(np.int32)], ["sum", "max"], [0, 1]
    layouts = [(PartSpec(shape, dtype, op), status) for shape in parts[0] for dtype in parts[1] for op in parts[2]
               for status in parts[3]]  # fmt: skip
    made = [ReceiveBuffers((spec,), status, room) for spec, status in layouts]
    assert len({buffers.name for buffers in made}) == len({buffers.text for buffers in made}) == len(layouts)
    assert made[0].text == "sum float32[5]; status 0"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool"])
def test_a_dtype_that_mpi_cannot_reduce_is_refused(dtype):
    for fine in ("int8", "uint32", "float32", "float64", "complex64"):
        check_dtypes([PartSpec((), np.dtype(fine), "sum")])
    with pytest.raises(CollectiveError, match=f"part 3 of a message is {dtype}"):
        check_dtypes([*LAYOUT, PartSpec((), jnp.dtype(dtype), "sum")])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("op", "at_end"), [("max", -1), ("min", 0)])
def test_integers_are_in_the_order_of_floats(op, at_end, dtype):
    ordered = np.array([-np.inf, -3.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, np.inf], dtype)
    whole = keys(ordered, op)
    assert (np.diff(whole) > 0).all()
    assert from_keys(whole, dtype).tobytes() == ordered.tobytes()
    for nan in (np.nan, -np.nan):
        found = np.sort(keys(np.array([nan, *ordered], dtype), op))
        assert np.isnan(from_keys(found, dtype)).tolist() == [i == at_end % 9 for i in range(9)]


def test_sums_are_rounded_to_infinity_without_a_warning():
    received = np.zeros(3, np.float32)
    with np.errstate(all="raise"):
        round_to(np.array([1e300, -1e300, 1.0]), received)
    assert received.tolist() == [np.inf, -np.inf, 1]
