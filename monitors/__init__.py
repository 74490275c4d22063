"""Monitors: operators that measure training while it runs, such as the gradient noise scale and compute time."""

from ._adam_scale import adam_scale as adam_scale
from ._anova import noise_estimate as noise_estimate
from ._ema import ema as ema
from ._example_norms import example_norms as example_norms
from ._gradients import gradient_norm as gradient_norm
from ._gradients import gradient_variance as gradient_variance
from ._machine import cpu_available as cpu_available
from ._machine import memory_available as memory_available
from ._noise import NoiseScale as NoiseScale
from ._noise import noise_scale as noise_scale
from ._nonfinite import nonfinite as nonfinite
from ._replica_distance import replica_distance as replica_distance
from ._spike import spike as spike
from ._timing import compute_seconds as compute_seconds
from ._timing import iteration_seconds as iteration_seconds
