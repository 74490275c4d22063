"""The machines of all processes: whether they compute bitwise equal results, and which are one host.

Reduced messages are bitwise equal on all workers. On machines of one kind, so is everything computed from them. On
different machines, a noise scale may differ in its seventh digit, and a batch size rounded from it by one example. The
first process then decides for all, which costs one small message after each step at which a hook is due.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import jax
import numpy as np

from adaptive.base.process.cores import chosen_threads
from adaptive.base.process.this_host import this_host
from adaptive.base.world import World


class HostSurvey:
    """Facts about the machines of all processes, exchanged once. Communicates.

    Attributes:
      heterogeneous: whether hardware or software differs between processes. Replicated.
      on_this_host: number of processes on this process's host. Local.
      host_names: names of the hosts, in the order of their first process. Replicated.
      run_id: a new unique id, 12 hexadecimal digits, drawn by the first process. Replicated.
    """

    def __init__(self, world: World, about: str = ""):
        own = json.dumps([kind_of_machine(world.devices), this_host(), secrets.token_hex(6)]).encode()
        descriptions = world.all_gather_bytes(own, about) if world.processes > 1 else [own]
        everyone = [json.loads(theirs) for theirs in descriptions]
        kinds, hosts, ids = zip(*everyone, strict=True)
        self.heterogeneous, self.run_id = len(set(kinds)) > 1, ids[0]
        self.on_this_host = hosts.count(this_host())
        self.host_names = tuple(host.partition(" ")[0] for host in dict.fromkeys(hosts))


def kind_of_machine(devices: Sequence) -> str:
    """Return a description of everything that the last bits of results depend on. Local."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    threads = chosen_threads(), os.environ.get("XLA_FLAGS")
    versions = jax.__version__, np.__version__
    kinds = sorted({device.device_kind for device in devices})
    return repr((platform.machine(), crc32("".join(features).encode()), kinds, versions, threads))
