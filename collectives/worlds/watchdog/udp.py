"""Datagrams between the processes of a world, for use when a process does not enter an MPI operation.

They are sent by UDP, which never blocks, and may be lost or duplicated. Each datagram is authenticated with a key that
only the world's processes have, and names its receiver. Other datagrams are ignored, including those that reach the
wrong process because two networks use the same address. Nothing is unpickled.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_SEAL = 32
_HERE = "127.0.0.1"

Address = tuple[str, int]


class UDPSocket:
    """The socket of one process.

    Attributes:
      addresses: addresses in all networks of this host, because it is unknown which of them other hosts can reach.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        self._port: int = self._socket.getsockname()[1]
        self.addresses: list[Address] = [(host, self._port) for host in own_hosts()]
        self._key = b""
        self._own = -1

    def join(self, key: bytes, own: int) -> None:
        """Set the key of the world's processes, and this process's number."""
        self._key, self._own = key, own

    def send(self, to: int, addresses: Iterable[Address], **fields: Any) -> None:
        """Send a datagram to all addresses of a process, without confirmation."""
        fields |= {"to": to, "from": self._own}
        body = json.dumps(fields).encode()
        sealed = hmac.digest(self._key, body, "sha256") + body
        for address in addresses:
            with suppress(OSError):
                self._socket.sendto(sealed, tuple(address))

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next datagram, with the sender's number under "from"; None if none arrives within `seconds`."""
        if not select.select([self._socket], [], [], max(0.0, seconds))[0]:
            return None
        try:
            sealed = self._socket.recv(1 << 16)
        except OSError:  # for example, the receiver of an earlier datagram does not exist
            return None
        body = sealed[_SEAL:]
        if not hmac.compare_digest(sealed[:_SEAL], hmac.digest(self._key, body, "sha256")):
            return None
        fields = json.loads(body)
        return fields if fields["to"] == self._own else None

    def ring(self) -> None:
        """Make `receive` return, if another thread is in it."""
        with suppress(OSError):
            self._socket.sendto(b"", (_HERE, self._port))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def own_hosts() -> list[str]:
    """Return the addresses of this host, the loopback address first."""
    import psutil

    found = [a.address for all_of in psutil.net_if_addrs().values() for a in all_of if a.family == socket.AF_INET]
    return [_HERE, *dict.fromkeys(address for address in found if not address.startswith("127."))]
