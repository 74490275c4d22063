"""Worlds of unlike machines: their arithmetic differs in last bits, so what is decided from it is taken from one of
them.

Messages are equal on all workers to the last bit. What each computes behind them is too, on machines of one kind. On
others a noise scale may differ in its seventh digit, and once in a while a batch that is rounded from it in an example.
Then the first process's decision is everyone's, at the price of one small message behind the steps at which a hook is
due.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import jax
import numpy as np

from adaptive.base.cores import chosen_threads
from adaptive.base.decision import Decision
from adaptive.base.world import World


def are_unlike(world: World, about: str = "") -> bool:
    """Whether processes compute on hardware of different kinds, or with different software. Replicated."""
    if world.processes == 1:
        return False
    return len(set(world.share(kind_of_machine(world.devices).encode(), about))) > 1


def kind_of_machine(devices: Sequence) -> str:
    """What the last bits of a result depend on: processor, devices, libraries and threads. Local."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    threads = chosen_threads(), os.environ.get("XLA_FLAGS")
    versions = jax.__version__, np.__version__
    kinds = sorted({device.device_kind for device in devices})
    return repr((platform.machine(), crc32("".join(features).encode()), kinds, versions, threads))


def decided_by_first(world: World, decision: Decision | None, about: str = "") -> Decision | None:
    """The first process's decision, on all. Communicates."""
    asked = None if decision is None else [decision.global_batch, decision.shares, decision.stop, decision.notes]
    everyone = world.share(json.dumps(asked, default=np.generic.item).encode(), about)
    first = json.loads(everyone[0])
    if first is None:
        return None
    global_batch, shares, stop, notes = first
    return Decision(global_batch, None if shares is None else tuple(shares), stop, tuple(notes))
