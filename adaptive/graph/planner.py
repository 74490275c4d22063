"""Plans of one driver for any number of examples, each from a new trace.

The compiler's thread traces a driver again for each kernel size. Each trace runs in the `AmbientContext` in which the
program was built, and is compared with the first trace: the messages and everything computed once per step must be
equal. The first size is traced again beside each new one and must be unchanged; otherwise one step would mix kernels of
two versions of the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import jax

from adaptive.base.errors import AdaptiveError, CollectiveError, DriverError
from adaptive.base.process.source_lines import at
from adaptive.base.process.thread_status import thread_status
from adaptive.base.values.ambient import AmbientContext
from adaptive.base.values.jaxprs import Var
from adaptive.operators.peer_read import PeerMailboxes

from .closures import Captured, captured_by, check_captured, check_functions
from .driver_errors import in_short, only_for_more
from .expressions import Expressions, another_program, check_same_operators, first_difference, sized
from .partition import plan
from .plan import Plan
from .trace import Graph, trace

_MANY = 64  # times as many examples, for which a driver is traced that fails for a few


@dataclass(eq=False)
class Planner:
    """Plans of one driver: `planner(examples)` returns the plan for microbatches of that many examples.

    Attributes:
      driver: `driver(state, batch) -> (state, metrics)`.
      state: the state's shapes.
      batch_of: returns the shapes of a batch of a number of examples.
      capacity: the number of worker slots.
      local_state: state leaves (by index) that may differ between workers by design.
      ambient: the context in which to trace; by default the current one.
      on_mesh: whether a worker computes on a mesh of devices.
      functions_checked: whether another planner has already checked what hooks and callbacks capture.
      mailboxes: the mailboxes on which this driver publishes; created later by the program.
      reference: the plan for the first size.
    """

    driver: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch_of: Callable[[int], Any]
    _: KW_ONLY
    capacity: int
    local_state: frozenset[int] = frozenset()
    ambient: AmbientContext = field(default_factory=AmbientContext)
    on_mesh: bool = False
    functions_checked: bool = False
    mailboxes: PeerMailboxes = field(default_factory=PeerMailboxes)
    reference: Plan = field(init=False)
    # The compiler's thread asks for plans, and so does `check`.
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)
    _whole: tuple[str, ...] = field(default=(), init=False)
    _one_size: str = field(default="", init=False)

    @thread_status("tracing the driver")
    def begin(self, examples: int) -> Plan:
        """Return the plan for the first size, with which other sizes are compared.

        Also traces the driver for a second size, to find the values that depend on the batch's shape.

        Raises:
          DriverError: the driver cannot be run as written.
        """
        with self._lock:
            try:
                self._first = self._trace(examples)
            except (AdaptiveError, MemoryError, OSError):
                raise
            except Exception as error:  # raised by the driver, which may need more examples than a microbatch has
                if self._can_be_traced(_MANY * examples):
                    raise only_for_more(error, self.driver, examples) from error
                raise
            while (settled := _settled(self.state, self._first.graph)) is not None:
                self.state = settled
                self._first = self._trace(examples)
            captured: Captured = []
            if not self.functions_checked:
                captured = captured_by(self._first)
                check_captured(self._first, captured)
            size = _another(examples, self._first.graph.multiple)
            try:
                self._second: Expressions | None = self._trace(size)
            except AdaptiveError:
                raise
            except Exception as error:  # raised by the driver, which may support one batch size only
                self._second = None
                self._whole = (f"the driver cannot be traced for {size} examples ({in_short(error)})",)
            if self._second is not None:
                check_same_operators(self._first, self._second)
                if not self.functions_checked:
                    check_functions(self._first, captured, self._second, self._trace)
                self._whole = tuple(self._sent_by_size(self._first, self._second))
                self._one_size = next(iter(self._whole), "")
            try:
                self.reference = self._plan(self._first, self._sized(self._first, self._second))
                if not self._whole and self._second is not None:
                    other = self._plan(self._second, self._sized(self._second, self._first))
                    self._check_same(self._second, other)
            except DriverError:
                self._check_unchanged()  # changes over time would look like changes with the size
                raise
            return self.reference

    def for_capacity(self, capacity: int) -> Planner:
        """Return a planner of the same driver for another number of worker slots, with a first plan of the same size.

        Raises:
          Exception: whatever the driver raises, which may be written for one number of slots.
        """
        others = replace(self, capacity=capacity, functions_checked=True, mailboxes=PeerMailboxes())
        others.begin(self._first.graph.examples)
        return others

    @thread_status("tracing the driver")
    def __call__(self, examples: int) -> Plan:
        """Return the plan for microbatches of `examples` examples.

        Raises:
          DriverError: the driver is another program for that size than for the first, or has changed since.
        """
        with self._lock:
            if examples == self._first.graph.examples:
                return self.reference
            theirs = self._second
            if theirs is None or theirs.graph.examples != examples:  # otherwise it is compared already
                try:
                    theirs = self._trace(examples)
                except (AdaptiveError, MemoryError, OSError):
                    raise
                except Exception as error:  # raised by the driver, which was traced for another size
                    self._check_unchanged()
                    raise only_for_more(error, self.driver, examples) from error
                self._check_unchanged()
                check_same_operators(self._first, theirs)
            found = self._plan(theirs, self._sized(theirs, self._first))
            self._check_same(theirs, found)
            return found

    def _trace(self, examples: int) -> Expressions:
        batch = self.batch_of(examples)
        trace_it = partial(trace, capacity=self.capacity, mailboxes=self.mailboxes, on_mesh=self.on_mesh)
        graph = self.ambient.run(trace_it, self.driver, self.state, batch)
        return Expressions(graph)

    def _can_be_traced(self, examples: int) -> bool:
        try:
            self._trace(examples)
        except Exception:  # whatever the driver raises
            return False
        return True

    def _plan(self, traced: Expressions, numbers: frozenset[Var]) -> Plan:
        found = plan(traced.graph, local_state=self.local_state, sized=numbers, whole=self._whole)
        return replace(found, one_size=self._one_size)

    def _sized(self, ours: Expressions, theirs: Expressions | None) -> frozenset[Var]:
        """Return the values that depend on the size; none if all batches have the same size."""
        return frozenset() if self._whole or theirs is None else sized(ours, theirs)

    def _sent_by_size(self, ours: Expressions, theirs: Expressions) -> Iterable[str]:
        """Return the messages whose size grows with the batch, such as rows of each example.

        Raises:
          CollectiveError: the values are reduced elementwise over the workers.
        """
        for one, other in zip(ours.ends(), theirs.ends(), strict=True):
            if one.collective is None or one.shapes == other.shapes:
                continue
            if one.collective.reduces:
                shape = next(a for a, b in zip(one.shapes, other.shapes, strict=True) if a != b)
                raise CollectiveError(
                    f"{one.what}{at(one.where)} has an array of shape {shape}, which depends on the number of "
                    "examples, and that differs between workers. Reduce it over the examples first:\n"
                    "    comm.all_reduce(x.mean(0))        comm.all_reduce(x.sum(0), op='sum')"
                )
            yield f"{one.what}{at(one.where)} sends a row for each example of the whole local batch"

    def _check_same(self, theirs: Expressions, other: Plan) -> None:
        """Check that messages and values computed once per step are the same as for the first size."""
        ours, reference = self._first, self.reference
        if self._one_size:
            raise DriverError(
                f"driver {ours.graph.name!r}: {self._one_size}, so every worker's batch must have "
                f"{ours.graph.examples} examples, as when the program was built; {theirs.graph.examples} are not "
                "possible. Gather values whose shape does not depend on the batch, such as a mean of the rows."
            )
        if reference.signature != other.signature or len(reference.fixed) != len(other.fixed):
            pairs = zip(ours.ends(), theirs.ends(), strict=True)
            raise another_program(
                ours.graph, theirs.graph, next((a.where for a, b in pairs if a.shapes != b.shapes), "")
            )
        for a, b in zip(reference.fixed, other.fixed, strict=True):
            where = first_difference(ours, a, theirs, b)
            if where is not None:
                raise another_program(ours.graph, theirs.graph, where)

    def _check_unchanged(self) -> None:
        """Trace the driver for the first size again, and check that it gives the same graph as before."""
        now = self._trace(self._first.graph.examples)
        check_same_operators(self._first, now)
        for one, other in zip(self._first.ends(), now.ends(), strict=True):
            for a, b in zip(one.atoms, other.atoms, strict=True):
                where = first_difference(self._first, a, now, b)
                if where is not None:
                    raise DriverError(
                        f"driver {now.graph.name!r}{at(where)} computes something else than when the program was "
                        "built, for the same batch. A driver is traced again for every kernel size, at any time, in "
                        "another thread: it must not depend on values that change (a global, an attribute, a counter, "
                        "the clock, numpy's random numbers). Keep such numbers in the state, or build another Program."
                    )


def _settled(state: Any, graph: Graph) -> Any:
    """Return the state's shapes without the weak types that the step's results no longer have, or `None` if there are
    none. From the second step on the state has those types, and the driver is compiled once for all steps.
    """
    leaves, tree = jax.tree.flatten(state)
    hardened = [old.weak_type and not new.aval.weak_type for old, new in zip(leaves, graph.new_state, strict=True)]
    if not any(hardened):
        return None
    shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype) if h else a for a, h in zip(leaves, hardened, strict=True))
    return jax.tree.unflatten(tree, shapes)


def _another(examples: int, multiple: int) -> int:
    """Return a size to compare with: the bucket below if there is one, and never 1, because 1 broadcasts."""
    units = examples // multiple
    below = 1 << (units - 1).bit_length() - 1 if units > 1 else 0
    return multiple * (below if below > 1 else units + 1)
