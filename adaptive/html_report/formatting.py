"""Format numbers, durations and lists of workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaptive.observe.scalars import listed


def number(value: float) -> str:
    """Format a number with about three digits: 1,234; 56.7; 0.0123; NaN."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else "∞" if value > 0 else "−∞"
    return (f"{value:,.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:.3g}").replace("-", "−")


def duration(seconds: float) -> str:
    """Format a duration: "3.1 s", "24 ms", "1 h 12 min"; "?" if not finite."""
    if not np.isfinite(seconds):
        return "?"
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60:,} h {minutes % 60} min"
    if seconds >= 59.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * factor:
            return f"{float(f'{seconds / factor:.3g}'):g} {unit}"
    return "0 s"


def percent(share: float) -> str:
    """Format a share from 0 to 1: "31 %", "0.4 %", "< 0.1 %"."""
    if 0 < share < 0.0095:
        return f"{100 * share:.1f} %" if share >= 0.0005 else "< 0.1 %"
    return f"{100 * share:.0f} %"


def workers(slots: Sequence[int]) -> str:
    """Format worker slots: "worker 2", "workers 8 to 15", "workers 1, 4 and 7"."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    pieces = [piece for run in runs for piece in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"worker{'s' * (len(slots) != 1)} {listed(pieces)}"
