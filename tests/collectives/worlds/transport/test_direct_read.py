"""Reads of another process's memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from collectives.worlds.transport import direct_read
from collectives.worlds.transport.direct_read import ShownMemory, read
from tests.mpirun import ROOT

ARRAYS = [np.arange(1000.0), np.zeros((0, 3)), np.arange(7, dtype=np.int8), np.full((3, 5), 2.5, np.float32)]
OWNER = """
import pickle, sys
import numpy as np
from collectives.worlds.transport.direct_read import ShownMemory
shown = ShownMemory([np.arange(1000.0), np.full(3, 7, np.int32)])
sys.stdout.buffer.write(pickle.dumps(shown.addresses))
sys.stdout.buffer.flush()
sys.stdin.read()
"""


def room(arrays=ARRAYS):
    return [np.full_like(array, 9) for array in arrays]


@pytest.fixture(autouse=True)
def permitted():
    """By a call of the system, not by `read`, whose failures would be skipped."""
    copy, byte = direct_read._process_vm_readv(), direct_read._Span(np.zeros(1, np.uint8).ctypes.data, 1)
    if copy is None or copy(os.getpid(), byte, 1, byte, 1, 0) != 1:
        pytest.skip("this system does not permit it")


@pytest.mark.parametrize("most", [1 << 28, 100])
def test_arrays_of_any_kind_are_read(most, monkeypatch):
    monkeypatch.setattr(direct_read, "_MOST", most)
    shown, into = ShownMemory(ARRAYS), room()
    assert read(shown.addresses, into)
    for got, array in zip(into, ARRAYS, strict=True):
        np.testing.assert_array_equal(got, array)


def test_another_process_is_read():
    import pickle

    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as owner:
        shown, into = pickle.load(owner.stdout), [np.zeros(1000), np.zeros(3, np.int32)]
        done = read(shown, into)
        owner.stdin.close()
    assert done
    np.testing.assert_array_equal(into[0], np.arange(1000.0))
    np.testing.assert_array_equal(into[1], np.full(3, 7))


def test_a_process_that_is_not_the_one_meant_is_not_read():
    shown, into = ShownMemory(ARRAYS), room()
    assert not read(shown.addresses._replace(token=bytes(16)), into)
    np.testing.assert_array_equal(into[0], room()[0])
    assert not read(shown.addresses._replace(pid=2**22 + 1), into)
    assert not read(shown.addresses, into[1:])


def test_where_there_is_no_such_call_nothing_is_read(monkeypatch):
    monkeypatch.setattr(direct_read.sys, "platform", "darwin")
    assert not read(ShownMemory(ARRAYS).addresses, room())
