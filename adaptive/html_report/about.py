"""Where a recorded run came from: hosts, versions, source and settings, as rows of names and texts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from .columns import Columns
from .formatting import counted


def about(run: Columns) -> dict[str, str]:
    """Return what the record says of a run's last process, by name; empty for an older record.

    Names are "began", "hosts", "command", "commit", names of packages, and arguments of `Program`.
    """
    if not run.origins:
        return {}
    first, last = run.origins[0], run.origins[-1]
    hosts = last["hosts"]
    began = datetime.fromtimestamp(first["process"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    starts = f", started {counted(len(run.origins), 'time')}" if len(run.origins) > 1 else ""
    rows = {"began": began + starts, "hosts": f"{', '.join(hosts)}" if hosts else "unknown"}
    rows |= {"command": " ".join(last["command"]), "commit": last["commit"] or "not in a git checkout"}
    return rows | dict(last["versions"]) | {name: _as_text(value) for name, value in last["settings"].items()}


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return names that two runs have with different texts, and both texts; "–" where a run has none."""
    names = [name for name in {**a, **b} if name != "began"]
    return [(name, a.get(name, "–"), b.get(name, "–")) for name in names if a.get(name) != b.get(name)]


def _as_text(value: Any) -> str:
    """Return a setting as text; a list of equal values as one value and their number."""
    if isinstance(value, list) and len(value) > 1 and len({repr(v) for v in value}) == 1:
        return f"{len(value)} × {_as_text(value[0])}"
    return ", ".join(map(_as_text, value)) if isinstance(value, list) else str(value)
