"""`balance`: give each worker what it can do in the time that the others take."""

from __future__ import annotations

import numpy as np

from adaptive._decision import Decision, Observation

from ._allocate import allocate, fill
from ._batch_time import BatchTime
from ._policy import Policy
from ._seconds import seconds_of
from ._time_model import WINDOW, TimeModel


def balance() -> Policy:
    """Keep the workers' steps equally long, by the sizes of their batches: `min_max` with its defaults.

        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(ctrl.balance(), seconds, every=10)

    Returns:
      A policy for a hook that is given each worker's compute seconds; shape=(n,).
    """
    return min_max()._replace(name="balance")


def min_max(
    *,
    window: int = 5,
    dead_band: float = 0.02,
    horizon: int = 100,
    switch_seconds: float = 0.0,
    growth: float = 2.0,
    quantum_loss: float = 0.02,
) -> Policy:
    """Split the global batch so that the slowest worker is done as early as can be.

    Learns of each worker how its step time goes with its batch size, `t_i(b) = max(floor_i, slope_i b + intercept_i)`,
    from the steps it sees, and solves for the integer split of least `max_i t_i(b_i)` exactly. Where times are
    proportional to the batch that is the split by speed; where a worker is slow whatever it gets, its batch is left
    alone. It follows a change of speed with the first decision that has seen `window` steps of it, and splits whatever
    global batch other hooks ask for.

    Args:
      window: how many steps a decision looks at, at least. Between decisions all steps are averaged.
      dead_band: the split changes when the slowest worker's step is expected to shorten by more than this fraction,
        and by more than noise, and not knowing how times go beyond the sizes seen, can feign.
      horizon: steps until sizes are likely to change for another reason …
      switch_seconds: … in which the gain must exceed what a change costs. By default nothing: programs make every size
        out of kernels that are compiled. (Tyagi & Sharma's 5 % dead-band pays for restarting TensorFlow.)
      growth: how many times the largest batch ever measured on a worker it may be given at once: further out, its
        time is a guess.
      quantum_loss: sizes are multiples of the program's quantum where that costs less than this fraction of the
        step; else of half of it, and so on.

    Returns:
      A policy for a hook that is given each worker's compute seconds; shape=(n,). NaN where not known.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing" (LB-BSP), for the problem and the model of time.
    """
    if not 1 <= window <= WINDOW:
        raise ValueError(f"min_max: window= is a number of steps from 1 to {WINDOW}, got {window}.")
    if dead_band < 0 or horizon < 1 or switch_seconds < 0 or growth <= 1 or quantum_loss < 0:
        raise ValueError(
            f"min_max: dead_band, switch_seconds and quantum_loss must not be negative, horizon at least 1 and growth "
            f"above 1; got {dead_band}, {switch_seconds}, {quantum_loss}, {horizon} and {growth}."
        )

    def update(observation: Observation, model: TimeModel) -> tuple[Decision | None, TimeModel]:
        seconds = seconds_of(observation, "min_max")
        model = model.observe(np.asarray(observation.previous_batch_sizes), seconds)
        if not observation.due or model.waiting < window:
            return None, model
        model = model.digest()
        return decide(observation, model), model

    def decide(observation: Observation, model: TimeModel) -> Decision | None:
        total, limits = observation.global_batch, observation.limits
        lower, upper = np.asarray(limits.lower), np.asarray(limits.upper)
        if len(lower) == 1 or not model.measured.all() or not lower.sum() <= total <= upper.sum():
            return None
        sizes = np.asarray(observation.batch_sizes)
        stay = sizes * (total / sizes.sum())  # what the split would be if it stays as it is
        trusted = np.minimum(
            upper, np.ceil(np.maximum(growth * model.largest, np.sqrt(growth) * stay)).astype(np.int64)
        )
        if trusted.sum() < total:
            trusted = upper
        times = model.fit()
        now, ideal = times(stay).max(), times(fill(total, times, lower, trusted)).max()
        band = max(dead_band, _feigned(model, stay, times(stay)))
        if not worth_it(now, ideal, band):
            return None
        split = _split(total, times, lower, trusted, limits.quantum, stay, ideal * (1 + quantum_loss))
        then = times(split).max()
        if not worth_it(now, then, band):
            return None
        note = f"slowest worker expected at {_ms(then)} a step, down from {_ms(now)}"
        return Decision(shares=tuple(map(float, split)), notes=(note,))

    def worth_it(now: float, then: float, band: float) -> bool:
        return now - then > band * now and (now - then) * horizon > switch_seconds

    return Policy(TimeModel.init, update, "min_max")


def _split(
    total: int,
    times: BatchTime,
    lower: np.ndarray,
    upper: np.ndarray,
    quantum: int,
    stay: np.ndarray,
    late: float,
) -> np.ndarray:
    """The split into the largest quanta that keep all workers from being late; near to what it was."""
    while quantum > 1:
        split = allocate(total, times, lower, upper, quantum, near=stay)
        if times(split).max() <= late:
            return split
        quantum //= 2
    return allocate(total, times, lower, upper, near=stay)


def _feigned(model: TimeModel, sizes: np.ndarray, seconds: np.ndarray) -> float:
    """How far the slowest of n equal workers may seem to lag behind, relatively: three standard deviations more than
    the largest of n is off by on average."""
    deviation = model.deviation(sizes)[np.argmax(seconds)]
    return float(deviation * (3 + np.sqrt(2 * np.log(len(seconds)))))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
