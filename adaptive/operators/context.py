"""The trace in progress: what is fixed while a driver is traced, and what must not get lost of it.

JAX traces a driver more than once, and keeps the traces of nested `jax.jit`s. Two things need care for that: its caches
do not know what a driver is traced for (see `trace_as`), and its dead code elimination takes operators without a result
for dead (see `DriverTrace.must_stay`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from jax.extend.core import Primitive
from jax.interpreters import mlir

from adaptive.base.errors import CollectiveError
from adaptive.base.jaxprs import traced_anew
from adaptive.base.source_lines import at, current_line


class DriverTrace(NamedTuple):
    """What is fixed while a driver is traced: numbers that shapes may be made of.

    `must_stay` lists the operators without a result that the driver has called: what marks each one's equation, and
    what to call it in an error if there is none in the graph. `minibatches` lists the ways in which the driver cuts its
    batch. `numbers` holds a value of the driver's outermost function, for operators that may stand in a loop and want
    to know the worker, the step and the seed (`peer_read.py`): it is empty until one of them has said so, by
    `wants_numbers`; then the driver is traced again. `hints` are added to a TypeError that the driver raises.
    """

    capacity: int
    examples: int
    must_stay: list[tuple[Any, str]]
    minibatches: list[Minibatches]
    mailboxes: Any
    numbers: list[Any]
    wants_numbers: list[str]
    hints: list[str]


class Minibatches(NamedTuple):
    """A way in which a driver cuts its batch."""

    multiple: int  # what batches are multiples of, so that it can be done
    why_whole: str  # with the driver's line


class WriteMark:
    """Tells one write of operator state from others."""


def stays(what: str, mark: Any = None) -> Any:
    """Note that an equation has to be in the graph, by a parameter of it; a new `WriteMark` if there is none."""
    mark, trace = mark or WriteMark(), tracing()
    if trace is not None:
        trace.must_stay.append((mark, what + at(current_line())))
    return mark


_tracing: ContextVar[DriverTrace | None] = ContextVar("adaptive_tracing", default=None)


def tracing() -> DriverTrace | None:
    """Return the trace in progress, or None if the driver runs eagerly."""
    return _tracing.get()


@contextmanager
def trace_as(capacity: int, examples: int, mailboxes: Any = None) -> Iterator[DriverTrace]:
    """Trace a driver for that many worker slots, and examples in a call.

    Args:
      mailboxes: of the program, on which the driver may publish.
    """
    trace = DriverTrace(capacity, examples, [], [], mailboxes, [], [], [])
    token = _tracing.set(trace)
    try:
        with traced_anew():
            yield trace
    finally:
        _tracing.reset(token)


def _refuse_to_compile(context, *operands, **params):
    raise CollectiveError(
        "an operator (a collective, monitor, hook, or a value such as ad.step()) is compiled by jax.jit outside a "
        "program. Run the driver in an ad.Program, or eagerly:\n"
        "    with jax.disable_jit():\n"
        "        driver(state, batch)"
    )


def only_in_programs(primitive: Primitive) -> None:
    """Have `jax.jit` outside a program refuse to compile what holds this primitive."""
    mlir.register_lowering(primitive, _refuse_to_compile)
