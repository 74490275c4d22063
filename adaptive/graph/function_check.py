"""A check that hooks and callbacks don't read the size of a microbatch: their functions serve all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import sleep

from jax.extend.core import Var

from adaptive.base.errors import DriverError
from adaptive.base.source_lines import at

from .closures import Difference, Record
from .expressions import Expressions, another_program, sized

_LOOKS, _PAUSE = 20, 0.005  # repetitions and seconds between them, after a difference was found

_Place = tuple[int, str]  # (index of an end of the graph, path to a variable of its functions)


def check_functions(ours: Expressions, theirs: Expressions, trace: Callable[[int], Expressions]) -> None:
    """Check that all objects that a hook or callback can read are the same for two microbatch sizes.

    Values that differ in every trace, such as clocks and counters, do not depend on the size. To recognize them, the
    driver is traced again for both sizes, in an order that the parity of a counter does not follow. Values that change
    while nothing is traced, for instance by another thread, are ignored too.

    Args:
      trace: traces the driver for a number of examples.

    Raises:
      DriverError: an object depends on the size, or cannot be compared. The error names the variable.
    """
    found = dict(_differences(ours, theirs))
    by_size = {place: d for place, d in found.items() if d.judged}
    for first in (theirs, ours, ours, theirs, ours):
        if not by_size:
            break
        again = trace(first.graph.examples)
        for place in (*(place for place, _ in _differences(first, again)), *_changed_meanwhile(again)):
            by_size.pop(place, None)
    for (number, _), difference in by_size.items():
        raise _reads_the_size(ours, theirs, number, difference)
    for (number, _), difference in found.items():
        if not difference.judged:
            raise _not_comparable(ours, number, difference)


def check_functions_again(ours: Expressions, now: Expressions, theirs: Expressions) -> None:
    """Check that objects which a trace for a further size created for a hook equal those of the first size.

    Args:
      now: a second trace for the first size.

    Raises:
      DriverError: an object depends on the size. The error names the variable.
    """
    changed = {place for place, _ in _differences(ours, now, outlasting=False)}
    for place, difference in _differences(ours, theirs, outlasting=False):
        if difference.judged and place not in changed:
            raise _reads_the_size(ours, theirs, place[0], difference)


def _differences(
    ours: Expressions, theirs: Expressions, *, outlasting: bool = True
) -> Iterator[tuple[_Place, Difference]]:
    """Yield differences between two traces' functions, without callbacks on examples, which may use the size."""
    of_the_call: frozenset[Var] | None = None
    for number, (one, other) in enumerate(zip(ours.functions, theirs.functions, strict=True)):
        for difference in one.differences(other, outlasting=outlasting) if one and other else ():
            if of_the_call is None:
                of_the_call, ends = sized(ours, theirs), list(ours.ends())
            if of_the_call.isdisjoint(a for a in ends[number].atoms if isinstance(a, Var)):
                yield (number, difference.path), difference


def _changed_meanwhile(traced: Expressions) -> Iterator[_Place]:
    """Yield the variables that change after a trace although nothing is traced."""
    ends = list(traced.ends())
    for _ in range(_LOOKS):
        sleep(_PAUSE)
        for number, (end, record) in enumerate(zip(ends, traced.functions, strict=True)):
            for difference in record.differences(Record(end.functions)) if record else ():
                yield number, difference.path


def _reads_the_size(ours: Expressions, theirs: Expressions, number: int, found: Difference) -> DriverError:
    end, (one, other) = list(ours.ends())[number], found.values
    sizes = f"{one} for {ours.graph.examples} and {other} for {theirs.graph.examples}"
    how = f" ({end.what} closes over it: {found.path}, is {sizes})"
    return another_program(ours.graph, theirs.graph, end.where, how)


def _not_comparable(ours: Expressions, number: int, found: Difference) -> DriverError:
    end, (one, _) = list(ours.ends())[number], found.values
    return DriverError(
        f"driver {ours.graph.name!r}{at(end.where)}: {end.what} reads an object that each trace of the driver "
        f"creates, and that cannot be compared between two traces: {found.path}, is {one}. It may hold the size of one "
        "microbatch. Create it once, outside the driver, or pass the number to the hook as a value:\n"
        "    ctrl.hook(fn, ad.global_batch())"
    )
