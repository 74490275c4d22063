"""What a strategy sends in a step of the program: the part of its messages that grows with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from adaptive.base.reductions import Gathered, Reduction
from collectives._coded import CodedSlices
from collectives._codes import codec_of
from collectives._island_sum import WithinIslands, checked_islands
from collectives._robust import Robust, robust_of
from collectives._wire import narrow

NUMBER = 4  # bytes of single precision


@dataclass(frozen=True)
class ModelMessage:
    """A message that carries a model, or a part of one.

    Attributes:
      op: how it is reduced over the workers, as in the program's plan.
      nbytes: `nbytes(parameters) -> int`: bytes that each worker contributes, for a model of so many float32 numbers.
      every: steps of the program from one such message to the next.
      beside: whether workers compute while it is on its way.
      islands: groups of which only one worker sends values other than zeros; `None` if all workers send.
    """

    op: Reduction
    nbytes: Callable[[int], int]
    every: int = 1
    beside: bool = False
    islands: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Traffic:
    """The messages of a strategy that grow with the model.

    Attributes:
      messages: one for each kind.
      local_steps: local steps in a step of the program, after which all workers wait for each other.
      quorum: `quorum(workers) -> int`: how many workers end a step of the program; `None`: it ends with the last one.
      grace: how much longer the others may then take, relative to its duration until then.
    """

    messages: tuple[ModelMessage, ...]
    local_steps: int = 1
    quorum: Callable[[int], int] | None = None
    grace: float = 0.0


def all_reduce_message(
    wire: Any = None, rounding: Any = "nearest", op: Any = "mean", *, of: int = 1, **more: Any
) -> ModelMessage:
    """Return the message of an `all_reduce` of a model's gradients or parameters.

    Args:
      wire, rounding, op: of the `all_reduce`.
      of: the model is cut into so many equal parts, and the message carries one.
      more: other attributes of the message.

    Raises:
      CollectiveError: the format or the rounding is not supported, or not with each other or `op`.
    """
    part = partial(_part, of=of)
    codec = codec_of(wire)
    if codec is not None:
        stochastic = rounding != "nearest"
        how: Reduction = Gathered() if codec.is_sparse else CodedSlices(codec, stochastic=stochastic)
        return ModelMessage(how, lambda parameters: codec.bytes_of(part(parameters)), **more)
    if isinstance(op, Robust) or op == "median":
        return ModelMessage(robust_of(op), lambda parameters: NUMBER * (part(parameters) + 1), **more)
    if wire is None:
        return ModelMessage("sum", lambda parameters: NUMBER * part(parameters), **more)
    how, width = narrow(wire, rounding, (), op), jnp.dtype(wire).itemsize
    return ModelMessage(how, lambda parameters: width * part(parameters), **more)


def compressed_messages(
    wire: Any, rounding: Any, hosts: Iterable[Iterable[int]] | None, op: Any = "mean"
) -> tuple[ModelMessage, ...]:
    """Return the messages of an `all_reduce` of a model with `hosts=`, which may be None.

    Raises:
      CollectiveError: an argument is not supported; see `all_reduce_message`.
    """
    if hosts is None:
        return (all_reduce_message(wire, rounding, op),)
    groups = checked_islands("all_reduce", hosts, None, "hosts")
    within = ModelMessage(WithinIslands(groups), lambda parameters: NUMBER * parameters)
    return within, all_reduce_message(wire, rounding, op, islands=groups)


def state_bytes(optimizer: Any) -> Callable[[int], int]:
    """Return a function that gives the bytes of an optimizer's state, for a model of so many float32 numbers."""

    def measured(parameters: int) -> int:
        shapes = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((parameters,), jnp.float32))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    return measured


def _part(parameters: int, of: int) -> int:
    return -(-parameters // of)
