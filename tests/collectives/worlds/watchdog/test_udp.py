"""Datagrams between sockets of this process."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import psutil

from collectives.worlds.watchdog.udp import UDPSocket, own_hosts
from tests.speed import limit


def test_the_addresses_of_this_host_begin_with_its_loopback_and_repeat_none(monkeypatch):
    def addresses(*given):
        families = {"6": socket.AF_INET6}
        return [SimpleNamespace(address=a, family=families.get(a[:1], socket.AF_INET)) for a in given]

    networks = {
        "lo": addresses("127.0.0.1", "127.0.0.2"),
        "e": addresses("10.0.0.1", "6::1"),
        "f": addresses("10.0.0.1"),
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: networks)
    assert own_hosts() == ["127.0.0.1", "10.0.0.1"]


def test_a_socket_can_be_made_to_stop_waiting():
    ours, found = UDPSocket(), []
    thread = threading.Thread(target=lambda: found.append(ours.receive(limit(60))))
    thread.start()
    ours.ring()
    thread.join(limit(30))
    assert found == [None]
    ours.close()
    ours.ring()  # nothing


def test_a_datagram_reaches_all_addresses_that_can_be_reached():
    ours, theirs = UDPSocket(), UDPSocket()
    for number, end in enumerate((ours, theirs)):
        end.join(b"key", number)
    theirs.send(0, [("no address", 1), *ours.addresses[:1] * 2], kind="hello")
    assert [ours.receive(limit(5)) for _ in range(2)] == [{"kind": "hello", "to": 0, "from": 1}] * 2
    assert ours.receive(-1.0) is None
    ours.close()
    theirs.close()
