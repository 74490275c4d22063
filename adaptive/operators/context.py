"""The context of a driver's trace in progress: sizes, and records of the operators that it has called.

JAX caches the traces of nested `jax.jit`s by keys without the sizes for which a driver is traced (see `trace_as`), and
its dead code elimination may remove operators without a result (see `DriverTrace.must_stay`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.interpreters import ad, batching, mlir

from adaptive.base.errors import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.jaxprs import Primitive, traced_anew


@dataclass
class DriverTrace:
    """The context of one trace of a driver.

    Attributes:
      capacity: number of worker slots.
      examples: examples in a microbatch.
      must_stay: operators without a result that the driver has called, as (mark in the equation's parameters, name for
        an error if the equation is missing in the graph).
      minibatches: for each call of `ad.minibatches`, how it cuts the batch.
      mailboxes: the program's mailboxes, on which the driver may publish.
      numbers: a traced vector of worker, step and seed, for operators in loops (`peer_read.py`).
      sampled: the numbers of examples of the batch for which an operator has computed values of single examples, where
        it leaves out others.
    """

    capacity: int
    examples: int
    mailboxes: Any = None
    numbers: Any = None
    must_stay: list[tuple[Any, str]] = field(default_factory=list)
    minibatches: list[Minibatches] = field(default_factory=list)
    sampled: set[int] = field(default_factory=set)


class Minibatches(NamedTuple):
    """How a driver cuts its batch into minibatches."""

    multiple: int  # required divisor of local batch sizes
    why_whole: str  # why a local batch cannot be split into microbatches, with the driver's line


def stays(what: str, mark: Any = None) -> Any:
    """Record that the graph must contain an equation of operator `what`. Returns the parameter that identifies it."""
    mark, trace = mark or object(), tracing()
    if trace is not None:
        trace.must_stay.append((mark, what + at(current_line())))
    return mark


_tracing: ContextVar[DriverTrace | None] = ContextVar("adaptive_tracing", default=None)


def tracing() -> DriverTrace | None:
    """Return the trace in progress, or None if the driver runs eagerly."""
    return _tracing.get()


@contextmanager
def trace_as(capacity: int, examples: int, mailboxes: Any = None) -> Iterator[DriverTrace]:
    """Set the context for tracing a driver, for the duration of the block."""
    trace = DriverTrace(capacity, examples, mailboxes)
    token = _tracing.set(trace)
    try:
        with traced_anew():
            yield trace
    finally:
        _tracing.reset(token)


def _refuse_to_compile(context, *operands, **params):
    raise CollectiveError(
        "an operator (a collective, monitor, hook, or a value such as ad.step_number()) is compiled by jax.jit outside "
        "a program. Run the driver in an ad.Program, or eagerly:\n"
        "    with jax.disable_jit():\n"
        "        driver(state, batch)"
    )


def only_in_programs(primitive: Primitive) -> None:
    """Make `jax.jit` outside a program raise an error for functions with this primitive."""
    mlir.register_lowering(primitive, _refuse_to_compile)


def no_result(primitive: Primitive) -> None:
    """Register rules for a primitive without results: ignored by `jax.grad`, refused by `jax.vmap`."""

    def jvp(primals, tangents, **params):
        return primitive.bind(*primals, **params), []

    def refuse(operands, dims, **params):
        raise CollectiveError(
            f"a hook or an operator state is mapped by jax.vmap{at(current_line())}. Move it out of the mapped "
            "function."
        )

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = refuse
