"""The examples of most sources. Without JAX: PyTorch's worker processes import this in each epoch."""

from __future__ import annotations

import numpy as np

LENGTH = 24
IDS = np.arange(LENGTH, dtype=np.int32)
X = np.random.default_rng(0).normal(size=(LENGTH, 3)).astype(np.float32)
IMAGES = np.broadcast_to(IDS.astype(np.uint8)[:, None, None], (LENGTH, 4, 4)) + np.eye(4, dtype=np.uint8)[::-1]

DICT = {"i": IDS, "x": X}
PAIR = (IDS, X)
