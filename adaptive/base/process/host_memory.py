"""The main memory that is left to this process, within the limits of its control groups (version 2)."""

from __future__ import annotations

from pathlib import Path


class MemoryLeft:
    """Bytes available to this process: the least of the system's and each limit's. The limits are looked up once.

    In a container, `membership` may have the host's path while the process's own group is mounted at the root; groups
    without files are ignored.
    """

    def __init__(self, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")):
        import psutil

        self._machine = psutil.virtual_memory
        lines = membership.read_text().splitlines() if membership.exists() else []
        own = [root / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
        folders = {f for group in own for f in (group, *group.parents) if f.is_relative_to(root)}
        limits = {f: (f / "memory.max").read_text().strip() for f in folders if (f / "memory.max").exists()}
        self._limits = {f: int(limit) for f, limit in limits.items() if limit != "max"}

    def __call__(self) -> float:
        machine = self._machine()
        within = [limit - _used(f) for f, limit in self._limits.items() if limit < machine.total]
        return float(max(min([machine.available, *within]), 0))


def _used(group: Path) -> int:
    """Return the bytes in use in a control group, without file caches that can be dropped."""
    entries = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.current").read_text()) - int(entries.get("inactive_file", 0))
