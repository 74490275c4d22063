"""The helper that starts processes which `jax.distributed` joins: what its tests rely on."""

from __future__ import annotations

import socket

import pytest

from tests.jaxrun import reserved_address, run


def test_a_reserved_address_is_given_once():
    with reserved_address() as address, reserved_address() as another, socket.socket() as other:
        host, port = address.split(":")
        assert address != another
        with pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))


def test_a_process_that_fails_fails_the_test(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('enough')")
    with pytest.raises(pytest.fail.Exception, match=r"to end with 0(.|\n)*ValueError: enough"):
        run(script, n=1)
