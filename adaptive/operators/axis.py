"""`jax.lax.pmean(x, "workers")` in a driver: a mean over all examples of the step, with a derivative.

Layers compute such means by the name of an axis: `axis_name=` of flax's batch normalization. In JAX a `pmean` is a sum
over a named axis, divided by the axis's size. So a driver is traced with an axis of that name, and after
differentiation each sum with its division is replaced by a collective.

In reverse mode the division precedes the sum: the mean of the cotangents. With J for the mean over examples of the
workers' losses L_i, and y = sum_j w_j x_j / W,

    dJ/dx_j = w_j / W  sum_i w_i / W  dL_i/dy

so worker j continues with the mean of dL_i/dy, and `all_reduce` of its gradient gives dJ/dp for every split. This
assumes that gradients are averaged over examples, the default, and that the loss is such a mean.

A layer on single examples, as in equinox, takes its mean over an axis of `jax.vmap` and the workers together:
`axis_name=("batch", "workers")`, divided by the product of their sizes. In reverse mode the cotangent is broadcast over
the examples, and summed over the workers. Here it is averaged before, because microbatches differ in size.

A `psum` without a division is refused: with unequal batches and several microbatches, it would not be the mean times a
number, which is its usual meaning.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.errors import CollectiveError
from adaptive.base.process.source_lines import at, current_line, line_of
from adaptive.base.values.jaxprs import ClosedJaxpr, JaxprEqn, Literal, Var

from .collectives import Collective, collective, collective_p
from .sources import EXAMPLES, read

WORKERS = "workers"
# The size of the axis while tracing, by which means are divided. A number that a driver is unlikely to divide by
# itself, so that its own quotients are not mistaken for means, and that is exact in half precision.
_SIZE = 4096
_MEAN = jax.lax.pmean.__code__


class _AxisSize(int):
    """The size of the axis, which only a mean may ask for: its division is removed, and any other use would stay.

    JAX multiplies by the size, also for a `psum` of a number.
    """

    def __rmul__(self, other: int) -> int:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not _MEAN:
            frame = frame.f_back
        if frame is None:
            raise _no_mean("psum of a number, or axis_size,", current_line())
        return other * int(self)


AXES = ((WORKERS, _AxisSize(_SIZE)),)


@dataclass(frozen=True)
class ExampleMean(Collective):
    """The mean over all examples, as `all_reduce` computes by default."""

    name = "pmean"
    reduces = True

    @property
    def weighted(self) -> bool:
        return True

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        return x


class Sum(NamedTuple):
    """One of JAX's sums over the workers: the equation, its operands and its results, as variables of the driver."""

    eqn: JaxprEqn
    operands: Sequence[Any]
    results: Sequence[Any]
    sizes: Sequence[int]  # for each operand, the product of the sizes of the array axes that the mean includes


def is_over_workers(eqn: JaxprEqn) -> bool:
    """Return whether an equation is one of JAX's own collectives, over the workers."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return WORKERS in (axes if isinstance(axes, tuple | list) else (axes,))


def as_collective(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return a jaxpr that computes the mean in place of a sum over the workers. The division remains.

    Raises:
      CollectiveError: the equation is another collective, or over further axes that are not of `jax.vmap`.
    """
    if eqn.primitive.name != "psum" or eqn.params.get("axis_index_groups") is not None:
        raise _no_mean(eqn.primitive.name, line_of(eqn.source_info))
    axes = _axes_of_array(eqn)
    if len(axes) + 1 != len(eqn.params["axes"]):
        raise CollectiveError(
            f"jax.lax.pmean{at(line_of(eqn.source_info))} is over {WORKERS!r} and an axis that is not one of jax.vmap. "
            f'Take the two means one after the other:\n    jax.lax.pmean(jax.lax.pmean(x, "examples"), "{WORKERS}")'
        )

    def mean(*values: jax.Array) -> list[jax.Array]:
        return collective(ExampleMean(), [v.mean(axes) if axes else v for v in values], weight=read(EXAMPLES))

    return jax.make_jaxpr(mean)(*(v.aval for v in eqn.invars))


def _axes_of_array(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the positional axes that an equation sums over, besides the named ones."""
    return tuple(axis for axis in eqn.params["axes"] if isinstance(axis, int))


def sizes_of(eqn: JaxprEqn) -> list[int]:
    """Return, for each operand of a sum, the number of its elements that are added to one element of the result."""
    return [math.prod(v.aval.shape[axis] for axis in _axes_of_array(eqn)) for v in eqn.invars]


def before_spread(eqn: JaxprEqn, made: Mapping[Any, JaxprEqn]) -> JaxprEqn | None:
    """Return the equation that broadcasts the operand of a sum over examples, if the operand is a mean's cotangent.

    Args:
      eqn: a sum over the workers, in the driver's variables.
      made: equations by the variables that they compute.
    """
    if len(eqn.invars) != 1 or eqn.primitive.name != "psum" or tuple(eqn.params["axes"]) != (WORKERS,):
        return None
    spread = made.get(eqn.invars[0]) if isinstance(eqn.invars[0], Var) else None
    if spread is None or spread.primitive.name != "broadcast_in_dim" or not isinstance(spread.invars[0], Var):
        return None
    divided = made.get(spread.invars[0])
    return spread if divided is not None and _divides(divided, spread_size(spread)) else None


def spread_size(spread: JaxprEqn) -> int:
    """Return the number of elements over which an equation broadcasts each element."""
    return spread.outvars[0].aval.size // max(spread.invars[0].aval.size, 1)


def without_divisions(
    eqns: Sequence[JaxprEqn], sums: Sequence[Sum], outvars: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """Return a driver's equations and results with each sum over the workers replaced by a mean, without its division.

    Raises:
      CollectiveError: a sum has no division before or after it, so it is not part of a mean.
    """
    made = {v: e for e in eqns for v in e.outvars}
    used: dict[Any, list[JaxprEqn]] = {result: [] for s in sums for result in s.results}
    for eqn in eqns:
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom in used:
                used[atom].append(eqn)
    quotients: dict[Any, Any] = {}  # replaced quotients: the mean for each
    dividends: dict[Any, Any] = {}  # replaced dividends, by the mean of each
    divisions: dict[Any, JaxprEqn] = {}  # by mean: the division by the number of examples that remains
    for eqn, operands, results, sizes in sums:
        for operand, result, size in zip(operands, results, sizes, strict=True):
            if used[result] and all(_divides(e, size) for e in used[result]) and result not in outvars:
                quotients.update((e.outvars[0], result) for e in used[result])
            elif isinstance(operand, Var) and operand in made and _divides(made[operand], size):  # in reverse mode
                division = made[operand]
                dividends[result] = division.invars[0]
                if size > 1:
                    by = Literal(np.asarray(size, result.aval.dtype), division.invars[1].aval)
                    divisions[result] = division.replace(invars=[result, by], outvars=[Var(result.aval)])
            elif used[result] or result in outvars:
                raise _no_mean(eqn.primitive.name, line_of(eqn.source_info))
    quotients.update((mean, division.outvars[0]) for mean, division in divisions.items())

    def mended(eqn: JaxprEqn) -> JaxprEqn:
        operands = list(eqn.invars)
        if eqn.primitive is collective_p:
            for place, mean in enumerate(eqn.outvars):
                operands[place] = dividends.get(mean, operands[place])
        return eqn.replace(invars=[_look_up(quotients, a) for a in operands])

    kept: list[JaxprEqn] = []
    removed = {v for v in quotients if v not in divisions}
    for eqn in eqns:
        if not any(v in removed for v in eqn.outvars):
            kept += [mended(eqn), *(divisions[v] for v in eqn.outvars if v in divisions)]
    return kept, [_look_up(quotients, a) for a in outvars]


def _look_up(instead: dict[Any, Any], atom: Any) -> Any:
    return instead.get(atom, atom) if isinstance(atom, Var) else atom


def _divides(eqn: JaxprEqn, size: int) -> bool:
    """Return whether an equation divides by the axis's size while tracing (`_SIZE`), times `size`."""
    by = eqn.invars[1] if eqn.primitive.name == "div" else None
    if not isinstance(by, Literal) or by.aval.shape != ():
        return False
    # Rounded as in the trace: in half precision large sizes are infinite. In numpy, because the caller may be tracing.
    with np.errstate(over="ignore"):
        return bool(by.val == np.asarray(_SIZE * size).astype(by.aval.dtype))


def _no_mean(what: str, line: str) -> CollectiveError:
    return CollectiveError(
        f"jax.lax.{what} over {WORKERS!r}{at(line)}: the only one of JAX's own collectives in a driver is "
        f'jax.lax.pmean(x, "{WORKERS}"), the mean over all examples. For others write\n'
        '    comm.all_reduce(x, op="sum")      op="max", op="min"\n'
        "    comm.all_gather(x)      ad.worker_index()      ad.num_workers()"
    )
