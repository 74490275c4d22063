"""Sources: scalars that the runtime passes to a driver: the step number, seconds, batch sizes, free CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.values.current import current_world
from adaptive.base.values.jaxprs import Primitive

from .context import only_in_programs

ALONE = np.ones(1, bool)  # one worker, which takes examples


class Reading(NamedTuple):
    """Data about one worker at the start of a step, from which sources read their values.

    `examples`, `microbatches` and `offset` differ between the microbatches of a worker's batch.
    """

    step: int  # steps done before this one
    seed: int
    worker: int
    global_batch: int  # examples over all workers in this step
    batch_size: int  # examples of this worker in this step
    examples: int  # examples in this microbatch
    microbatches: int  # 1 in a microbatch; the number of microbatches in values of the whole local batch
    offset: int  # position of the microbatch's first example in the step's global batch
    compute_seconds: float  # the previous step's computation on this worker; NaN if unknown
    iteration_seconds: float  # from the start of the previous step to the start of this one; NaN in the first
    taking_part: np.ndarray = ALONE  # boolean, shape=(capacity,): whether each worker takes examples in this step


@dataclass(frozen=True, eq=False)
class Source:
    """A scalar that the runtime feeds into the graph.

    Attributes:
      name: its name in `explain()`.
      read: returns the value; called once per worker and step.
      dtype: `float32` or `int32`.
      scope: where the value is the same: on "all" workers, or in all microbatches of one "worker". "microbatch" is for
        the sources of this module that differ between microbatches, which know their values.
      stand_in: its value outside a program.
    """

    name: str
    read: Callable[[Reading], float]
    dtype: Any = np.float32
    scope: Literal["all", "worker", "microbatch"] = "worker"
    stand_in: float = 0.0


# `attrgetter` makes no Python call; sources are read in every step.
EXAMPLES = Source("examples", attrgetter("examples"), scope="microbatch", stand_in=1.0)
MICROBATCHES = Source("microbatches", attrgetter("microbatches"), scope="microbatch", stand_in=1.0)
OFFSET = Source("offset", attrgetter("offset"), np.int32, scope="microbatch")
STEP = Source("step", attrgetter("step"), np.int32, scope="all")
SEED = Source("seed", lambda r: r.seed & 0x7FFFFFFF, np.int32, scope="all")  # any Python integer will do
GLOBAL_BATCH = Source("global_batch", attrgetter("global_batch"), np.int32, scope="all", stand_in=1)
BATCH_SIZE = Source("batch_size", attrgetter("batch_size"), np.int32, stand_in=1)
WORKER = Source("worker", attrgetter("worker"), np.int32)
WORKERS = Source("workers", lambda r: int(r.taking_part.sum()), np.int32, scope="all", stand_in=1)
# Their values do not change while the batch sizes stay.
FIXED = frozenset({EXAMPLES, MICROBATCHES, OFFSET, SEED, GLOBAL_BATCH, BATCH_SIZE, WORKER, WORKERS})

source_p = Primitive("source")
only_in_programs(source_p)
source_p.def_abstract_eval(lambda *, source: jax.core.ShapedArray((), source.dtype))


@source_p.def_impl
def _source_eager(*, source):
    # Outside a program the number of examples is unknown, so a mean over several workers raises an error (see
    # eager.py).
    world = current_world.get()
    if source is EXAMPLES and world is not None and world.capacity > 1:
        return jnp.asarray(np.nan, source.dtype)
    if source is WORKERS and world is not None:
        return jnp.asarray(world.size, source.dtype)
    return jnp.asarray(source.stand_in, source.dtype)


def read(source: Source) -> jax.Array:
    """Return the source's value in this step: a scalar of its dtype. Replicated if its scope is "all", else local."""
    return source_p.bind(source=source)
