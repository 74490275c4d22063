"""The values that control hooks see, and the decisions that they return.

A hook runs on every worker, on the same values, after a step. It returns a `Decision`, which the program applies
between steps, on all workers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np


class BoundArrays(NamedTuple):
    """`Limits` as arrays. Read-only."""

    lower: np.ndarray  # shape=(n,), int64
    upper: np.ndarray  # shape=(n,), int64
    active: np.ndarray  # shape=(active workers,), int64: their indices


class _Bounds(NamedTuple):
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    quantum: int = 1
    multiple: int = 1
    examples: int = sys.maxsize
    call_overhead: float = 0.0


class Limits(_Bounds):
    """Bounds on a split of the global batch over the workers, a named tuple. Replicated.

    Both bounds are 0 for a worker without examples: an empty slot, or a share of 0.

    Attributes:
      lower: minimum examples of each worker.
      upper: maximum examples of each worker.
      quantum: preferred multiple: such sizes need few kernels.
      multiple: required multiple: from the driver's minibatches, and the mesh that splits a batch.
      examples: maximum over all workers: the data set's length.
      call_overhead: cost of one more microbatch, in examples; a constant (`CALL_OVERHEAD`), 0 where batches cannot be
        split. Policies prefer sizes that run as fewer microbatches of powers of two, whose kernels are compiled.
    """

    @cached_property
    def least(self) -> int:
        """The smallest global batch."""
        return max(sum(self.lower), self.multiple)

    @cached_property
    def most(self) -> int:
        """The largest global batch."""
        most = min(self.examples, sum(self.upper))
        return most - most % self.multiple

    def nearest(self, global_batch: int) -> int:
        """Return the valid global batch nearest to a requested one."""
        rounded = (global_batch + self.multiple // 2) // self.multiple * self.multiple
        return min(max(rounded, self.least), self.most)

    @cached_property
    def active(self) -> tuple[int, ...]:
        """The workers that take examples: a policy splits over these, and gives the others 0."""
        return tuple(self.arrays.active.tolist())

    @cached_property
    def arrays(self) -> BoundArrays:
        """The bounds and the active workers as arrays, for policies of many workers."""
        lower, upper = np.array(self.lower, np.int64), np.array(self.upper, np.int64)
        found = BoundArrays(lower, upper, np.flatnonzero(upper > 0))
        for part in found:
            part.flags.writeable = False
        return found

    def of(self, takes_part: Sequence[bool] | np.ndarray) -> Limits:
        """Return the limits with both bounds 0 for workers that take no examples."""
        there = np.asarray(takes_part, bool)
        if there.all() and len(there) == len(self.lower):
            return self
        lower, upper = (tuple(np.where(there, bounds, 0).tolist()) for bounds in self.arrays[:2])
        return self._replace(lower=lower, upper=upper)


class Observation(NamedTuple):
    """A completed step as a hook sees it. Every field is replicated."""

    step: int  # number of this step, from 1
    epoch: float  # epochs of data consumed, as a fraction
    values: tuple[Any, ...]  # the driver's values for the hook: pytrees of numpy arrays
    batch_sizes: tuple[int, ...]  # examples per worker in this step
    previous_batch_sizes: tuple[int, ...]  # of the previous step, to which measured seconds refer
    global_batch: int  # of the next step, with requests of earlier hooks
    limits: Limits
    due: bool = True  # whether a decision is taken now; policies also see steps between
    members: tuple[int, ...] = ()  # the occupied worker slots; those in `limits.active` take examples
    joined: tuple[int, ...] = ()  # worker slots whose worker is new since the previous observation
    target_workers: int = 0  # requested number of members, with requests of earlier hooks
    least_workers: int = 0  # a requested number of workers is clipped to these two
    most_workers: int = 0
    hyperparameters: Mapping[str, Any] = MappingProxyType({})  # of the next step, by name
    hyperparameter_types: Mapping[str, np.dtype] = MappingProxyType({})  # dtype of each, by name
    examples: int = 0  # consumed since the beginning, this step included


@dataclass(frozen=True)
class Decision:
    """Changes between this step and the next. `None` leaves a field unchanged.

    Attributes:
      global_batch: examples per step over all workers.
      shares: relative weights, one per worker; integers that sum to the global batch are used exactly. A worker with
        share 0 takes no examples until it gets another share.
      stop: end the run after this step.
      notes: lines for the report: the reason, and what was clipped.
      workers: the requested number of members.
      hyperparameters: values of the driver's `ad.hyperparameter`s, by name.
    """

    global_batch: int | None = None
    shares: tuple[float, ...] | None = None
    stop: bool = False
    notes: tuple[str, ...] = ()
    workers: int | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        asked = self.global_batch is not None or self.shares is not None or self.workers is not None
        return asked or self.stop or bool(self.hyperparameters)


@dataclass(frozen=True)
class Known:
    """Static facts about a value passed to a hook, known before the first step.

    Attributes:
      sources: names of the sources that it is computed from; empty if it depends on anything else, such as examples or
        the state.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sources: frozenset[str]


class Handler(Protocol):
    """The implementation of a hook; `controllers.hook` creates handlers from functions and policies.

    An optional method `check(values, n_workers)` is called when a program is built, with a `Known` in place of each
    leaf, and raises if the handler cannot use such values.
    An optional method `rests_until(state)` returns the number of the first step after which the handler can decide
    anything again; it is not called before. Saves time if the handler takes longer than short steps. The result must
    depend on the state only.
    An optional method `why(observation, state)` returns why the handler has just asked for nothing, for the record.
    """

    every_step: bool  # whether the handler also sees steps between decisions

    def init(self, n_workers: int) -> Any:
        """Return the initial state: a pytree of numpy arrays and numbers, checkpointed by the program. Replicated.

        Later states keep its structure, shapes and dtypes, which identify them in a checkpoint.
        """
        ...

    def __call__(self, observation: Observation, state: Any) -> tuple[Decision | None, Any]:
        """Return a decision and the new state. Must depend on the arguments only, so that all workers decide alike."""
        ...
