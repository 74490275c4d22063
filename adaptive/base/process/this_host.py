"""An identifier of the host that this process runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def this_host() -> str:
    """Return an identifier of this host. Local."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
