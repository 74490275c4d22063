"""The memory that a worker needs in a step, by purpose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from adaptive.data.rows import Data
from adaptive.runtime.engine import Engine
from adaptive.runtime.message import Layout
from adaptive.runtime.step_plan import bytes_per_execution

_MIB = 1 << 20
_BATCHES = 2  # the step's batch, and the next one, which is fetched during the step


class Needed(NamedTuple):
    """Memory for one purpose."""

    what: str
    nbytes: int
    details: str


def memory_needed(engine: Engine, data: Data, batch_sizes: Sequence[int]) -> list[Needed]:
    """Return the memory that a worker of this process needs in a step, by purpose. Local.

    Does not include the interpreter, libraries, compiled code, and memory that the C library keeps for reuse.

    Args:
      batch_sizes: batch sizes of all workers.
    """
    plan, world = engine.plan, engine.world
    one = engine.workers.some_present
    state = engine.states[one]
    local = [state[i] for i in plan.local_state]
    op_states = [a for values in engine.op_states[one] for a in values]
    sent, largest = bytes_per_execution(plan, engine.layouts), max(batch_sizes[worker] for worker in world.workers)
    several = any(engine.kernels.may_split(i, batch_sizes[worker]) for i, worker in enumerate(world.workers))
    arrives = [layout for layout, m in zip(engine.layouts, plan.messages, strict=True) if m.travels]
    alone = world.processes == 1 and len(world.devices) == 1
    row = sum(leaf.nbytes for leaf in jax.tree.leaves(data.example))
    temporaries = list(_temporaries(engine))
    found = [
        Needed("state", _bytes_of(state), f"{len(state)} leaves"),
        Needed("initial values", _bytes_of(local), "of local leaves, for workers that join"),
        Needed("operator states", _bytes_of(op_states), "of monitors and other operators"),
        Needed("constants", _bytes_of(_constants(engine)), "that the driver closes over"),
        Needed(
            "parts of messages",
            sent * (1 + several),
            "gradients and other values that a microbatch sends"
            + "; twice, as a batch may run as several microbatches" * several,
        ),
        Needed("receive buffers", 0 if alone else _bytes_of(arrives), "for reduced messages"),
        Needed(
            "temporaries",
            max(temporaries, default=0),
            "of the largest compiled kernel" if temporaries else "not known before the first step",
        ),
        Needed("batches", _BATCHES * largest * row, f"{_BATCHES} of {largest} examples: one is fetched ahead"),
    ]
    if data.in_memory:
        found.append(Needed("data set", len(data) * row, "in memory, for all workers of the process"))
    return [needed for needed in found if needed.nbytes or needed.what in ("state", "temporaries")]


def in_words(needed: Sequence[Needed]) -> list[str]:
    """Return the lines for `explain()`: the total, and its parts, in MiB."""
    total = sum(n.nbytes for n in needed)
    return [
        f"memory   {total / _MIB:,.1f} MiB for a worker in a step, without the interpreter and compiled code",
        *(f"    {n.what:<18} {n.nbytes / _MIB:>10,.1f} MiB   {n.details}" for n in needed),
    ]


def _bytes_of(arrays: Iterable[jax.Array | Layout]) -> int:
    return sum(a.nbytes for a in arrays)


def _constants(engine: Engine) -> Iterable[Any]:
    """Yield each constant once, even if several programs read it."""
    arrays = [c for values in engine.context.programs.consts.values() for c in values[0].values()]
    arrays += [c for kernel in engine.kernels.compiled.all_of(0) for c in kernel.call.consts.values()]
    return {id(c): c for c in arrays}.values()


def _temporaries(engine: Engine) -> Iterator[int]:
    """Yield the bytes of temporaries of each compiled program, if XLA reports them."""
    programs = [*engine.compiled(0), *(kernel.run for kernel in engine.kernels.compiled.all_of(0))]
    for program in programs:
        analysis = getattr(program, "memory_analysis", lambda: None)()
        if analysis is not None:
            yield analysis.temp_size_in_bytes
