"""Records whose truth is known."""

from __future__ import annotations

import json

import numpy as np

PARTS = ("input", "computing", "exchanging", "waiting", "hooks", "compiling", "other")


def record(path, busy, *, sizes=None, input_=None, parts=None, fields=None, metrics=None, noise=None, every=10):
    """Write a run.

    Args:
      busy: seconds of each worker; shape=(T, n), NaN for an empty slot.
      sizes: examples; by default 32 for each who is there.
      input_: of these, seconds of input; by default none.
      parts: seconds of the breakdown by name, scalars or shape=(T,); computing and waiting follow from `busy`.
      fields: fields of single steps, by their number.
      metrics: by name; shape=(T,).
      noise: scale and bounds; shape=(T, 3).
    """
    busy = np.asarray(busy, float)
    steps, n = busy.shape
    run_id = str(path.stat().st_size if path.exists() else 0)
    there = np.isfinite(busy)
    busy = np.nan_to_num(busy)
    sizes = np.where(there, 32, 0) if sizes is None else np.broadcast_to(sizes, busy.shape)
    input_ = np.zeros_like(busy) if input_ is None else np.broadcast_to(input_, busy.shape)
    parts = {name: np.broadcast_to((parts or {}).get(name, 0.0), (steps,)) for name in PARTS}
    parts |= {"computing": busy[:, 0] - input_[:, 0], "waiting": busy.max(1) - busy[:, 0], "input": input_[:, 0]}
    hooks = [
        {
            "name": "0/adapt",
            "every": every,
            "leaves": ["noise.scale", "noise.lower", "noise.upper"] * (noise is not None),
        }
    ]
    header = {"kind": "header", "version": 5, "run_id": run_id, "workers": n, "examples": 1000, "seed": 0,
              "global_batch": 1, "breakdown": PARTS,
              "lower": [1] * n, "upper": [99] * n, "quantum": 1, "multiple": 1, "hooks": hooks}  # fmt: skip
    lines = [header]
    for t in range(steps):
        line = {"kind": "step", "run_id": run_id, "step": t + 1, "epoch": t / 100, "batch_sizes": sizes[t].tolist(),
                "members": np.flatnonzero(there[t]).tolist(), "joined": [],
                "seconds": float(sum(parts[name][t] for name in PARTS)), "skipped": False, "lost": [],
                "hooks": {} if noise is None else {"0/adapt": plain(noise[t])},
                "decision": None, "notes": [],
                "message_bytes": 8, "hyperparameters": {}}  # fmt: skip
        line["breakdown"] = [float(parts[name][t]) for name in PARTS]
        of_workers = {"input": input_[t], "computing": busy[t] - input_[t], "busy": busy[t]}
        of_workers["waiting"] = busy[t].max() - busy[t]
        line["workers"] = {name: np.where(there[t], values, 0).tolist() for name, values in of_workers.items()}
        line["metrics"] = {name: plain(values[t]) for name, values in (metrics or {}).items()}
        lines.append(line | (fields or {}).get(t + 1, {}))
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
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
