"""How much an example contributes to training, by batch size."""

from __future__ import annotations

import math


def efficiency(noise_scale: float, batch: float, base: float = 1.0) -> float:
    """Return the statistical efficiency of a batch size: an example's contribution, relative to a batch of size `base`.

        (noise + base) / (noise + batch)

    References:
      McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", eq. 2.7; Qiao et al. 2021, "Pollux", eq. 6.
    """
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + base) / (noise_scale + batch)
