"""The main memory that is left to this process, within the limits of its control groups (version 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class MemoryLimit(NamedTuple):
    """The memory limit of a control group, if it is below the machine's memory."""

    limit: int  # bytes
    group: Path

    def left(self) -> float:
        """Return the bytes left until the limit is reached; file caches that can be dropped count as left."""
        entries = dict(line.split() for line in (self.group / "memory.stat").read_text().splitlines())
        used = int((self.group / "memory.current").read_text()) - int(entries.get("inactive_file", 0))
        return float(max(self.limit - used, 0))


def memory_limits(membership: Path, root: Path, machine_bytes: int) -> Iterator[MemoryLimit]:
    """Yield the limits below `machine_bytes` of the control groups that this process is in, and of their parents.

    In a container, `membership` may have the host's path while the process's own group is mounted at the root; groups
    without files are ignored.
    """
    lines = membership.read_text().splitlines() if membership.exists() else []
    for group in [root / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        for folder in [f for f in (group, *group.parents) if f.is_relative_to(root)]:
            limit = folder / "memory.max"
            text = limit.read_text().strip() if limit.exists() else "max"
            if text != "max" and int(text) < machine_bytes:
                yield MemoryLimit(int(text), folder)


class MemoryLeft:
    """Bytes available to this process: the least of the system's and each limit's. The limits are looked up once."""

    def __init__(self, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")):
        import psutil

        self._system = psutil.virtual_memory
        self._limits = list(memory_limits(membership, root, self._system().total))

    def __call__(self) -> float:
        return min([float(self._system().available), *(limit.left() for limit in self._limits)])
