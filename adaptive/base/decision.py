"""What control hooks see, and what they may ask for.

A hook runs on every worker, on the same values, after a step. It asks for a `Decision`; the program
applies it between steps, on all workers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np


class Limits(NamedTuple):
    """What a split over the workers has to keep. Replicated.

    Of a worker that takes no part, because nobody sits on its seat or its share is 0, both bounds are 0.
    """

    lower: tuple[int, ...]  # the least examples each worker may get
    upper: tuple[int, ...]  # the most examples each worker may get
    quantum: int = 1  # sizes are best multiples of this, so that each is made of few kernels
    multiple: int = 1  # sizes are always multiples of this: the minibatches that a driver cuts its batches into
    examples: int = sys.maxsize  # the most of all workers together: what there is in the data set
    call_overhead: float = (
        0.0  # what one more kernel call costs, in examples: a size with no kernel of its own takes several
    )

    @property
    def least(self) -> int:
        """The smallest global batch."""
        return max(sum(self.lower), self.multiple)

    @property
    def most(self) -> int:
        """The largest global batch."""
        most = min(self.examples, sum(self.upper))
        return most - most % self.multiple

    def nearest(self, global_batch: int) -> int:
        """The global batch that can be, nearest to one that is asked for."""
        rounded = (global_batch + self.multiple // 2) // self.multiple * self.multiple
        return min(max(rounded, self.least), self.most)

    @property
    def active(self) -> tuple[int, ...]:
        """The workers that take examples: a policy splits over these, and gives 0 to the others."""
        return tuple(i for i, most in enumerate(self.upper) if most > 0)

    def of(self, takes_part: Sequence[bool]) -> Limits:
        """The limits where the others take no part."""
        lower, upper = (
            tuple(bound if there else 0 for bound, there in zip(bounds, takes_part, strict=True))
            for bounds in (self.lower, self.upper)
        )
        return self._replace(lower=lower, upper=upper)


class Observation(NamedTuple):
    """One step, as a hook sees it after it. Every field is replicated."""

    step: int  # steps done, this one included
    epoch: float  # epochs of data consumed, as a fraction
    values: tuple[Any, ...]  # what the driver gave to the hook at this step: pytrees of numpy arrays
    batch_sizes: tuple[int, ...]  # examples per worker in this step
    previous_batch_sizes: tuple[int, ...]  # those of the step before: seconds measured by the runtime are of that step
    global_batch: int  # the global batch of the next step as asked for so far: earlier hooks of this barrier included
    limits: Limits
    due: bool = True  # whether a decision is taken now; steps in between are shown too, for policies that average
    members: tuple[int, ...] = ()  # the seats with a worker on them; `limits.active` are those that take examples
    joined: tuple[int, ...] = ()  # seats with another worker than in the step shown before: nothing is known of it
    target_workers: int = 0  # how many members there are to be, as asked for so far: earlier hooks included
    least_workers: int = 0  # a number of workers that is asked for is clipped to these two
    most_workers: int = 0
    hyperparameters: Mapping[str, Any] = MappingProxyType({})  # of the next step as asked for so far, by name
    hyperparameter_types: Mapping[str, np.dtype] = MappingProxyType({})  # in which each is computed, by name


@dataclass(frozen=True)
class Decision:
    """What is to change between this step and the next. `None` leaves a thing as it is.

    Attributes:
      global_batch: examples per step over all workers.
      shares: relative weights, one per worker; integers that sum to the global batch are taken exactly. A worker whose
        share is 0 takes no examples until it is given another share.
      stop: end the run after this step.
      notes: lines for the report: why this was asked for, what was clipped.
      workers: how many members there are to be.
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
    """What is known of a value that a hook is given, before any step.

    Attributes:
      sources: names of what is measured that it is made of, and nothing else; empty where anything else is in it, such
        as examples or the state.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sources: frozenset[str]


class Handler(Protocol):
    """What stands behind a hook: `controllers.hook` makes these from functions and from policies.

    One that cannot read whatever a driver may hand it has a method `check(values, n_workers)` beside these. It is
    called when a program is built, with the values as the hook will be given them, but each leaf a `Known`, and raises.
    One that costs more than some steps take may have a method `rests_until(state)`: the number of the first step after
    which it can decide anything again. It is not called before. What it returns must follow from the state.
    """

    every_step: bool  # show steps between due ones too

    def init(self, n_workers: int) -> Any:
        """The hook's state: a pytree of numpy arrays and numbers, kept and checkpointed by the program. Replicated.

        Later states keep its structure, shapes and dtypes: by those a checkpoint's are recognised.
        """
        ...

    def __call__(self, observation: Observation, state: Any) -> tuple[Decision | None, Any]:
        """Decide. Must depend on nothing but its arguments, so that all workers decide alike."""
        ...
