"""Three tasks that are trained to a test loss, with a fixed batch in a plain loop, or with a policy in a program."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _language_model as language
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load


class Task(NamedTuple):
    """What is trained, and to which test loss."""

    name: str
    init: Callable[[int], Any]  # weights, of a seed
    loss_fn: Callable[[Any, Any], jax.Array]
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    optimizer: Callable[[Any], optax.GradientTransformation]  # of a learning rate
    rule: Any  # of `scale_by_batch`, for this optimizer
    lr: float  # where the search for the smallest batch's begins
    batches: tuple[int, ...]  # the static ones
    every: int  # examples between evaluations
    most: int  # examples, at which a run is given up
    target: float  # test loss


class Machine(NamedTuple):
    """Seconds of a step: `(fixed + examples / workers * each) + exchange`, with an equal split."""

    name: str
    workers: int
    fixed: float
    each: float
    exchange: float

    def seconds(self, batch: Any) -> Any:
        """Return the seconds of a step."""
        return self.fixed + self.each * batch / self.workers + self.exchange

    def first_of(self, batches: Sequence[int]) -> int:
        """Return the batch nearest to that of which half a step's seconds are fixed: where a policy starts."""
        half = (self.fixed + self.exchange) * self.workers / self.each
        return min(batches, key=lambda batch: abs(math.log(batch / max(half, 1.0))))


class _SmallConvNet(nn.Module):
    """KungFu's experiment in small: two layers of convolution, 21 thousand parameters."""

    @nn.compact
    def __call__(self, image):
        x = nn.relu(nn.Conv(16, (5, 5), strides=2)(image))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


class _Perceptron(nn.Module):
    """Two layers, 13 thousand parameters."""

    @nn.compact
    def __call__(self, image):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(nn.relu(nn.Dense(128)(image.reshape(len(image), -1))))))


def _classifier(net: nn.Module, data: Any) -> tuple[Callable, Callable]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = net.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return lambda seed: net.init(jax.random.key(seed), data.train["image"][:1]), loss_fn


@functools.cache
def task(name: str) -> Task:
    """Return a task by its name."""
    if name == "Fashion-MNIST":
        data = load("fashion-mnist")
        init, loss_fn = _classifier(_SmallConvNet(), data)
        sgd = functools.partial(optax.sgd, momentum=0.9)
        test = {key: rows[:5000] for key, rows in data.test.items()}
        grid = tuple(2**k for k in range(6, 10))
        return Task(name, init, loss_fn, data.train, test, sgd, "adascale", 0.05, grid, 3072, 100_000, 0.42)
    if name == "digits":
        data = load("digits")
        init, loss_fn = _classifier(_Perceptron(), data)
        grid = tuple(2**k for k in range(4, 10))
        return Task(name, init, loss_fn, data.train, data.test, optax.adam, "sqrt", 1e-3, grid, 128, 40_000, 0.06)
    if name == "text":
        train, test, n_characters = language.text(32)
        test = {"codes": test["codes"][::4]}
        init = lambda seed: language.init(seed, n_characters, width=48, blocks=1, context=32)  # noqa: E731
        grid = tuple(2**k for k in range(4, 9))
        return Task(name, init, language.loss_fn, train, test, optax.adam, "sqrt", 4e-3, grid, 1024, 60_000, 1.8)
    raise ValueError(name)


TASKS = ("Fashion-MNIST", "digits", "text")
Mark = tuple[int, float, list[list[int]]]  # examples so far, test loss, [batch, steps] since the last mark


class PlainLoop:
    """Training with a fixed batch, without the library: one jitted step on rows of the data in a random order."""

    def __init__(self, task: Task, batch: int, lr: float, seed: int):
        optimizer = task.optimizer(lr)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(
            state: Any, batch: Any
        ) -> Any:  # not in a scan: XLA's convolutions on CPUs are ten times as slow there
            params, opt_state = state
            grads = jax.grad(task.loss_fn)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = task.init(seed)
        self.state = params, optimizer.init(params)
        self._step, self._train, self._batch = step, task.train, batch
        self._order = _order(len(next(iter(task.train.values()))), seed)

    def step(self) -> Any:
        """Take a step. Returns the state."""
        rows = np.fromiter(self._order, np.int32, count=self._batch)
        return self.step_on({name: column[rows] for name, column in self._train.items()})

    def step_on(self, batch: Any) -> Any:
        """Take a step on a batch. Returns the state."""
        self.state = self._step(self.state, batch)
        return self.state


def _order(n: int, seed: int) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(n).tolist()


def fixed(task: Task, batch: int, lr: float, seed: int) -> Iterator[Mark]:
    """Train with a fixed batch in a plain loop. Yields marks."""
    loop, loss, test = PlainLoop(task, batch, lr, seed), jax.jit(task.loss_fn), jax.tree.map(jnp.asarray, task.test)
    per_mark = max(task.every // batch, 1)
    for examples in range(per_mark * batch, task.most + per_mark * batch, per_mark * batch):
        for _ in range(per_mark):
            loop.step()
        yield examples, float(loss(loop.state[0], test)), [[batch, per_mark]]


class Adaptive(NamedTuple):
    """A policy for the batch, on a machine's modeled seconds."""

    policy: ctrl.Policy
    machine: Machine
    first: int  # batch
    scaled: bool  # whether the learning rate follows the batch, by the task's rule


def program_of(task: Task, way: Adaptive, lr: float, seed: int) -> ad.Program:
    """Return a program in which a policy sets the batch."""
    rule = ctrl.scale_by_batch(task.rule if way.scaled else "fixed", base=way.first)
    optimizer = optax.chain(task.optimizer(lr), rule)

    def driver(state: Any, batch: Any) -> Any:
        params, opt_state = state
        _, grads, norms = mon.example_norms(task.loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, avg_grads, per_example=norms)
        iteration = way.machine.seconds(ad.global_batch().astype(jnp.float32))
        seconds = comm.all_gather(iteration - way.machine.exchange)
        values = (noise, seconds, iteration) if way.policy.name == "goodput_batch" else (noise,)
        ctrl.hook(way.policy, *values, every=10)
        updates, opt_state = optimizer.update(avg_grads, opt_state, params, noise=noise)
        return (optax.apply_updates(params, updates), opt_state), {}

    params = task.init(seed)
    state = params, optimizer.init(params)
    return ad.Program(driver, state, task.train, global_batch=way.first, seed=seed, deterministic=True)


def adaptive(task: Task, way: Adaptive, lr: float, seed: int) -> Iterator[Mark]:
    """Train through the library, with a batch that a policy sets. Yields marks."""
    loss, test = jax.jit(task.loss_fn), jax.tree.map(jnp.asarray, task.test)
    with program_of(task, way, lr, seed) as program:
        spans: list[list[int]] = []
        mark = task.every
        for report in program.run():
            if not spans or spans[-1][0] != report.global_batch:
                spans.append([report.global_batch, 0])
            spans[-1][1] += 1
            if report.examples >= mark:
                yield report.examples, float(loss(program.state[0], test)), spans
                mark, spans = report.examples + task.every, []
            if report.examples >= task.most:
                return
