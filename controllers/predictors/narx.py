"""`narx`: predicts speeds with a small neural network of past speeds and of past and present inputs, trained online.

The networks of all workers are trained together, with an axis of workers, on the host's processor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .base import Predictor, best_of, known, memoryless, moving_average
from .lags import Lags

BUFFER = 400  # records that a network is trained on
BATCH = 32  # records in one step of training
FIRST = 50  # records before the first prediction


class Network(NamedTuple):
    """Parameters of a network from a row of p lags to a change of speed. All have a leading axis of workers."""

    hidden: Any  # shape=(p, width)
    bias: Any  # shape=(width,)
    out: Any  # shape=(width,): initially zeros, which predict no change
    offset: Any  # shape=()


class Learner(NamedTuple):
    """Records, parameters and optimizer states of n networks, on the host. p = lags + (lags + 1) n_inputs."""

    rows: Any  # shape=(BUFFER, n, p), float32: a ring buffer of records
    changes: Any  # shape=(BUFFER, n), float32: changes of speed in the steps of the rows
    usable: Any  # shape=(BUFFER, n), bool: where there is a record; elsewhere the row is zero
    mean: Any  # shape=(n, p), float32: of the rows
    scale: Any  # shape=(n, p), float32: standard deviation of the rows
    params: Network  # every leaf of shape=(n, …)
    opt_state: optax.OptState


class NarxState(NamedTuple):
    """State of `narx`."""

    lags: Lags
    seen: np.ndarray  # shape=(), int64: records so far
    learner: Learner


def narx(lags: int = 2, width: int = 10, steps: int = 2, learning_rate: float = 3e-3, seed: int = 0) -> Predictor:
    """Return a predictor by nonlinear autoregression with exogenous inputs: the speed predictor of LB-BSP.

        v[k] = F(v[k-1], …, v[k-L]; u[k], u[k-1], …, u[k-L])

    with F a network of one hidden tanh layer. After each prediction it takes a few steps of Adam on records of the last
    400 steps. For each worker, it is used only while its recent errors are smaller than those of a moving average and
    of the last speed.

    Args:
      lags: L.
      width: width of the hidden layer.
      steps: steps of Adam per step of the program.
      learning_rate: learning rate of Adam.
      seed: seed of the initial parameters, and of the records that training draws.

    Raises:
      ValueError: an argument is out of range.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing" (LB-BSP), section 3.2, which leaves sizes and schedules open.
    """
    if lags < 1 or width < 1 or steps < 1 or learning_rate <= 0:
        raise ValueError(
            f"narx: lags, width and steps must be at least 1 and learning_rate positive; "
            f"got {lags}, {width}, {steps} and {learning_rate}."
        )

    def init(n_workers: int, n_inputs: int) -> NarxState:
        shape = n_workers, lags + (lags + 1) * n_inputs
        with _on_host():
            learner = _first(width, *shape, seed)
            # Compile both functions here, and not in the program's first step that needs them.
            _predict(learner, np.zeros(shape, np.float32))
            nothing = np.zeros(shape, np.float32), np.zeros(n_workers, np.float32), np.zeros(n_workers, bool)
            _learn(learning_rate, learner, nothing, np.int32(0), np.zeros((steps, BATCH), np.int32))
        return NarxState(Lags.init(n_workers, n_inputs, lags), np.asarray(0), learner)

    def update(state: NarxState, speed: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, NarxState]:
        before, history = state.lags, state.lags.push(speed, inputs)
        row, target = before.row()[:, :-1], speed / before.speed_unit
        usable = np.isfinite(row).all(axis=1) & known(target)
        learner, seen = state.learner, int(state.seen)
        now = history.row()[:, :-1]
        with _on_host():
            if usable.any():
                record = _float32(row, usable[:, None]), _float32(target - row[:, 0], usable), usable
                draw = np.random.default_rng((seed, seen)).integers(0, min(seen + 1, BUFFER), (steps, BATCH))
                learner = _learn(learning_rate, learner, record, np.int32(seen), draw.astype(np.int32))
                seen += 1
            # With the parameters from before this step, so as not to wait for the training.
            change, ready = map(np.asarray, _predict(state.learner, _float32(now, np.isfinite(now))))
        last = now[:, 0]
        prediction = np.where(ready, np.clip(last + change, last / 3, last * 3), np.nan) * history.speed_unit
        return prediction, NarxState(history, np.asarray(seen), learner)

    return best_of(moving_average(), memoryless(), Predictor(init, update, "network"))._replace(name="narx")


@contextmanager
def _on_host() -> Iterator[None]:
    """Compute on the host, on any device of the program, and with JAX's standard dtype promotion, which optax needs."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.numpy_dtype_promotion("standard"):
        yield


def _float32(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where, values, 0.0).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _first(width: int, n: int, p: int, seed: int) -> Learner:
    """Return the initial learner, with the same parameters for all workers."""
    hidden = jax.nn.initializers.lecun_normal()(jax.random.key(seed), (p, width), jnp.float32)
    one = Network(hidden, *(jnp.zeros(shape, jnp.float32) for shape in ((width,), (width,), ())))
    params = jax.tree.map(lambda leaf: jnp.tile(leaf, (n, *[1] * leaf.ndim)), one)
    rows, changes, mean = (jnp.zeros(shape, jnp.float32) for shape in ((BUFFER, n, p), (BUFFER, n), (n, p)))
    usable, scale = jnp.zeros((BUFFER, n), bool), jnp.ones((n, p), jnp.float32)
    return Learner(rows, changes, usable, mean, scale, params, optax.adam(1.0).init(params))


def _outputs(learner: Learner, rows: jax.Array) -> jax.Array:
    """Apply each worker's network to its normalized row; rows of shape=(n, p). Returns shape=(n,)."""

    def output(network: Network, row: jax.Array) -> jax.Array:
        return jnp.tanh(row @ network.hidden + network.bias) @ network.out + network.offset

    return jax.vmap(output)(learner.params, (rows - learner.mean) / learner.scale)


@jax.jit
def _predict(learner: Learner, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the predicted changes of speed, and whether there are enough records for them; each shape=(n,)."""
    return _outputs(learner, rows), learner.usable.sum(axis=0) >= FIRST


@functools.partial(jax.jit, static_argnums=0)
def _learn(
    learning_rate: float,
    learner: Learner,
    record: tuple[jax.Array, jax.Array, jax.Array],
    seen: jax.Array,
    draw: jax.Array,
) -> Learner:
    """Add a record (rows, changes, where usable) to the ring buffer, and take steps of Adam on the records `draw`."""
    learner = _record(learner, *record, seen)

    def loss(params: Any, places: jax.Array) -> jax.Array:
        usable = learner.usable[places]
        predicted = jax.vmap(lambda rows: _outputs(learner._replace(params=params), rows))(learner.rows[places])
        squares = jnp.where(usable, predicted - learner.changes[places], 0.0) ** 2
        return jnp.sum(squares / jnp.maximum(usable.sum(axis=0, keepdims=True), 1)) / 2

    def step(carry: tuple[Any, Any], places: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, opt_state = carry
        updates, opt_state = optax.adam(learning_rate).update(jax.grad(loss)(params, places), opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    (params, opt_state), _ = jax.lax.scan(step, (learner.params, learner.opt_state), draw)
    return learner._replace(params=params, opt_state=opt_state)


def _record(learner: Learner, rows: jax.Array, changes: jax.Array, usable: jax.Array, seen: jax.Array) -> Learner:
    """Add a record to the ring buffer, and update mean and scale of the rows, over about BUFFER records."""
    place = seen % BUFFER
    weight = jnp.where(usable, 1.0 / jnp.minimum(seen + 1, BUFFER), 0.0)[:, None]
    off = jnp.where(usable[:, None], rows - learner.mean, 0.0)
    variance = jnp.where(seen == 0, 1.0, learner.scale**2) * (1 - weight) + weight * off**2
    return learner._replace(
        rows=learner.rows.at[place].set(rows),
        changes=learner.changes.at[place].set(changes),
        usable=learner.usable.at[place].set(usable),
        mean=learner.mean + weight * off,
        scale=jnp.sqrt(jnp.maximum(variance, 1e-4)),
    )
