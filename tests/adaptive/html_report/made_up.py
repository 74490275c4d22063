"""Records whose truth is known."""

from __future__ import annotations

import json

import numpy as np

PARTS = ("input", "computing", "exchanging", "waiting", "hooks", "compiling", "other")
ORIGIN = {
    "process": 1e9, "build": 1e9 + 1, "built": 1e9 + 2, "hosts": ["a", "b"], "command": ["train.py", "--lr", "3"],
    "versions": {"python": "3.11.7", "jax": "0.10.2"},
    "settings": {"max_local_batch": [8, 8, 8], "batch sizes": [4, 5], "seed": 0},
}  # fmt: skip


def record(
    path, busy, *, sizes=None, input_=None, waited=0.0, parts=None, fields=None, metrics=None, noise=None, every=10
):
    """Write a run, which worker 0 records. The first process starts at 1e9, and its program is built 2 s later.

    Args:
      busy: seconds of each worker; shape=(T, n), NaN for an empty slot.
      sizes: examples; by default 32 for each who is there.
      input_: of these, seconds of input; by default none.
      waited: seconds that even the last worker waited in a step, as in a program of several messages.
      parts: seconds of the breakdown by name, scalars or shape=(T,); computing and waiting follow from `busy`.
      fields: fields of single steps, by their number.
      metrics: by name; shape=(T,).
      noise: scale and bounds; shape=(T, 3).
      every: how often the hook is called.
    """
    busy = np.asarray(busy, float)
    steps, n = busy.shape
    there = np.isfinite(busy)
    busy = np.nan_to_num(busy)
    sizes = np.where(there, 32, 0) if sizes is None else np.broadcast_to(sizes, busy.shape)
    input_ = np.zeros_like(busy) if input_ is None else np.broadcast_to(input_, busy.shape)
    together = busy.max(1) + waited
    parts = {name: np.broadcast_to((parts or {}).get(name, 0.0), (steps,)) for name in PARTS}
    parts |= {"computing": busy[:, 0] - input_[:, 0], "waiting": together - busy[:, 0], "input": input_[:, 0]}
    seconds = sum(parts.values())
    leaves = ["noise.scale", "noise.lower", "noise.upper"] * (noise is not None)
    header = {"kind": "header", "version": 6, "run_id": "a", "workers": n, "examples": 1000, "seed": 0,
              "global_batch": 1, "lower": [1] * n, "upper": [99] * n, "quantum": 1, "multiple": 1, "breakdown": PARTS,
              "hooks": [{"name": "0/adapt", "every": every, "leaves": leaves}]}  # fmt: skip
    lines, at = [header], 1e9 + 2 + np.cumsum(seconds)
    for t in range(steps):
        of_workers = {"input": input_[t], "computing": busy[t] - input_[t], "busy": busy[t]}
        micro = {name: np.rint(1e6 * np.where(there[t], v, 0)).astype(int).tolist() for name, v in of_workers.items()}
        line = {"kind": "step", "run_id": "a", "step": t + 1, "epoch": t / 100, "batch_sizes": sizes[t].tolist(),
                "members": np.flatnonzero(there[t]).tolist(), "joined": [], "hyperparameters": {}, "at": at[t],
                "seconds": float(seconds[t]), "skipped": False, "lost": [], "message_bytes": 8,
                "hooks": {} if noise is None else {"0/adapt": plain(noise[t])}, "decision": None, "notes": [],
                "breakdown": [float(parts[name][t]) for name in PARTS],
                "microseconds": micro | {"together": round(1e6 * together[t])},
                "metrics": {name: plain(values[t]) for name, values in (metrics or {}).items()}}  # fmt: skip
        line |= {"origin": ORIGIN} if not t else {}
        own = (fields or {}).get(t + 1, {})
        restored = {name: line.pop(name) for name in ("kind", "run_id", "step")} | own  # `restored` follows `step`
        lines.append({**restored, **line, **own})
    with path.open("a") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return path


def plain(values):
    """As records have numbers that JSON has not."""
    words = {np.inf: "inf", -np.inf: "-inf"}
    if np.ndim(values):
        return [plain(value) for value in values]
    return None if np.isnan(values) else words.get(float(values), float(values))


def uneven(steps, n, spread, seed=0):
    """Workers that differ by chance alone."""
    return 0.02 * np.random.default_rng(seed).lognormal(0, spread, (steps, n))
