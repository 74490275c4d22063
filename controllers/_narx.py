"""`narx`: speed from a small neural network of past speeds, and of past and present inputs. Learnt as it goes.

The networks of all workers are trained side by side, as batched matrix products of numpy: they are so small that a
compiled program would not pay for its compilation, which the steps would have to wait for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._lags import Lags
from ._predictors import Predictor, best_of, known, memoryless, moving_average

BUFFER = 400  # records that a network learns from
BATCH = 32  # records in one step of training
FIRST = 50  # records before it says anything


class Network(NamedTuple):
    """`out(tanh(hidden(x)))` for each worker; gradients and moments come in the same shape."""

    hidden: np.ndarray  # shape=(n, p + 1, width): weights, and the bias last
    out: np.ndarray  # shape=(n, width + 1)


class NarxState(NamedTuple):
    """State of `narx`. p = lags + (lags + 1) n_inputs."""

    lags: Lags
    rows: np.ndarray  # shape=(BUFFER, n, p), float32: a ring of records; NaN where there are none
    targets: np.ndarray  # shape=(BUFFER, n), float32
    seen: np.ndarray  # shape=(), int64: records put into the ring
    mean: np.ndarray  # shape=(n, p), of the rows
    scale: np.ndarray  # shape=(n, p), standard deviation of the rows
    network: Network
    first_moment: Network
    second_moment: Network


def narx(lags: int = 2, width: int = 10, steps: int = 2, learning_rate: float = 3e-3, seed: int = 0) -> Predictor:
    """Nonlinear autoregression with exogenous inputs: the speed predictor of LB-BSP.

        v[k] = F(v[k-1], …, v[k-L]; u[k], u[k-1], …, u[k-L])

    with F a network of one hidden tanh layer. Series-parallel: it is fed true past speeds. After every prediction it
    takes a few steps of Adam on records of the latest 400 steps, so that the prediction does not wait for them. It
    speaks for a worker only while it has lately been better than a moving average and than the last speed.

    Args:
      lags: L.
      width: of the hidden layer.
      steps: of Adam per step of the program.
      learning_rate: of Adam.
      seed: of first weights, and of the records that training draws.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing" (LB-BSP), section 3.2, which leaves sizes and schedules open;
      Diaconescu 2008, "The use of NARX neural networks to predict chaotic time series".
    """
    if lags < 1 or width < 1 or steps < 1 or learning_rate <= 0:
        raise ValueError(
            f"narx: lags, width and steps must be at least 1 and learning_rate positive; "
            f"got {lags}, {width}, {steps} and {learning_rate}."
        )

    def init(n_workers: int, n_inputs: int) -> NarxState:
        n, p = n_workers, lags + (lags + 1) * n_inputs
        rng = np.random.default_rng(seed)
        hidden = np.tile(rng.standard_normal((p + 1, width)) / np.sqrt(p + 1), (n, 1, 1))
        zero = Network(np.zeros((n, p + 1, width)), np.zeros((n, width + 1)))
        return NarxState(
            lags=Lags.init(n, n_inputs, lags),
            rows=np.full((BUFFER, n, p), np.nan, np.float32),
            targets=np.full((BUFFER, n), np.nan, np.float32),
            seen=np.asarray(0),
            mean=np.zeros((n, p)),
            scale=np.ones((n, p)),
            network=Network(hidden, zero.out),
            first_moment=zero,
            second_moment=zero,
        )

    def update(state: NarxState, speed: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, NarxState]:
        state = _record(state, speed)
        history = state.lags.push(speed, inputs)
        state = state._replace(lags=history)
        row = history.row()[:, :-1]
        last = row[:, 0]
        change, _ = _forward(state.network, ((row - state.mean) / state.scale)[None])
        ready = np.isfinite(state.targets[:FIRST]).sum(axis=0) >= FIRST
        prediction = np.where(ready, np.clip(last + change[0], last / 3, last * 3), np.nan) * history.speed_unit
        if state.seen >= FIRST // 2:
            state = _train(state, steps, learning_rate, seed)
        return prediction, state

    return best_of(moving_average(), memoryless(), Predictor(init, update, "network"))._replace(name="narx")


def _record(state: NarxState, speed: np.ndarray) -> NarxState:
    """Put what was known before a step, and how fast the step was, into the ring."""
    row, target = state.lags.row()[:, :-1], speed / state.lags.speed_unit
    usable = np.isfinite(row).all(axis=1) & known(target)
    if not usable.any():
        return state
    place = int(state.seen) % BUFFER
    rows, targets = state.rows.copy(), state.targets.copy()
    rows[place] = np.where(usable[:, None], row, np.nan)
    targets[place] = np.where(usable, target, np.nan)
    seen = state.seen + 1
    # Training must not see its inputs' units move under it: a mean over all records at first, over BUFFER later on.
    weight = np.where(usable, 1.0 / np.minimum(seen, BUFFER), 0.0)[:, None]
    off = np.where(usable[:, None], row - state.mean, 0.0)
    mean = state.mean + weight * off
    variance = np.where(seen == 1, 1.0, state.scale**2) * (1 - weight) + weight * off**2
    scale = np.sqrt(np.maximum(variance, 1e-4))
    return state._replace(rows=rows, targets=targets, seen=np.asarray(seen), mean=mean, scale=scale)


def _forward(network: Network, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs, shape=(batch, n), and hidden activations, shape=(n, batch, width); x of shape=(batch, n, p)."""
    hidden = np.tanh(x.transpose(1, 0, 2) @ network.hidden[:, :-1] + network.hidden[:, -1:])
    return (hidden @ network.out[:, :-1, None])[:, :, 0].T + network.out[:, -1], hidden


def _train(state: NarxState, steps: int, learning_rate: float, seed: int) -> NarxState:
    """Some steps of Adam on the squared error of the change of speed."""
    rng = np.random.default_rng((seed, int(state.seen)))
    network, first, second = state.network, state.first_moment, state.second_moment
    for k in range(steps):
        draw = rng.integers(0, min(int(state.seen), BUFFER), BATCH)
        rows, targets = state.rows[draw].astype(np.float64), state.targets[draw].astype(np.float64)
        usable = np.isfinite(targets)
        x = np.where(usable[:, :, None], (rows - state.mean) / state.scale, 0.0)
        wanted = np.where(usable, targets - rows[:, :, 0], 0.0)
        gradient = _gradient(network, x, wanted, usable)
        count = (int(state.seen) - FIRST // 2) * steps + k + 1
        first = Network(*(0.9 * m + 0.1 * g for m, g in zip(first, gradient, strict=True)))
        second = Network(*(0.999 * v + 0.001 * g**2 for v, g in zip(second, gradient, strict=True)))
        rate = learning_rate * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        network = Network(*(w - rate * m / (np.sqrt(v) + 1e-8) for w, m, v in zip(network, first, second, strict=True)))
    return state._replace(network=network, first_moment=first, second_moment=second)


def _gradient(network: Network, x: np.ndarray, wanted: np.ndarray, usable: np.ndarray) -> Network:
    """Of the mean squared error over the usable records of each worker."""
    output, hidden = _forward(network, x)
    error = np.where(usable, output - wanted, 0.0).T[:, :, None] / np.maximum(usable.sum(axis=0), 1)[:, None, None]
    of_hidden = error * network.out[:, None, :-1] * (1 - hidden**2)
    into = x.transpose(1, 2, 0) @ of_hidden
    return Network(
        np.concatenate([into, of_hidden.sum(axis=1, keepdims=True)], axis=1),
        np.concatenate([(hidden.transpose(0, 2, 1) @ error)[:, :, 0], error.sum(axis=1)], axis=1),
    )
