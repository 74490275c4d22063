"""Small messages between the processes of a world, beside MPI: for when a process does not come to what MPI waits for.

UDP, since nothing of it may ever wait. Whoever sends may have to send again; whoever receives may get things twice.
Each datagram is sealed with a key that only the world's processes have, and names its receiver, so that strangers are
ignored, and what reaches another process under an address that two networks have. Nothing is unpickled.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

MOST_BYTES = 60_000  # in a datagram; IP cuts those that are longer than a frame in pieces, and puts them together
_SEAL = 32
_HERE = "127.0.0.1"

Address = tuple[str, int]


class UDPSocket:
    """One process's socket.

    Attributes:
      addresses: under which others may reach it: of all of this host's networks, since which of them another host sees
        is not known here.
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
        """Be number `own` among those who have this key."""
        self._key, self._own = key, own

    def send(self, to: int, addresses: Iterable[Address], **fields: Any) -> None:
        """Send to all of a process's addresses; one that is not reached is not waited for."""
        fields |= {"to": to, "from": self._own}
        body = json.dumps(fields).encode()
        sealed = hmac.digest(self._key, body, "sha256") + body
        for address in addresses:
            with suppress(OSError):
                self._socket.sendto(sealed, tuple(address))

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """What comes within so many seconds, with the number of who sent it under "from"; `None` if nothing does."""
        if not select.select([self._socket], [], [], max(0.0, seconds))[0]:
            return None
        try:
            sealed = self._socket.recv(1 << 16)
        except OSError:  # a former datagram's receiver was not there, say
            return None
        body = sealed[_SEAL:]
        if not hmac.compare_digest(sealed[:_SEAL], hmac.digest(self._key, body, "sha256")):
            return None
        fields = json.loads(body)
        return fields if fields["to"] == self._own else None

    def ring(self) -> None:
        """Have `receive` return, in whichever thread it is."""
        with suppress(OSError):
            self._socket.sendto(b"", (_HERE, self._port))

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()


def own_hosts() -> list[str]:
    """This host's addresses, that of the host to itself first."""
    import psutil

    found = [a.address for all_of in psutil.net_if_addrs().values() for a in all_of if a.family == socket.AF_INET]
    return [_HERE, *dict.fromkeys(address for address in found if not address.startswith("127."))]
