"""Tracks the axis of the examples through the equations of a loss.

Per-example gradients exist if each example's loss depends only on that example. The rules here prove it: a value is
equal for all examples, has one row per example, is a sum over examples, or mixes examples. A loss that is a sum over
examples has per-example gradients. An operation that is not known to keep examples separate counts as mixing them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from adaptive.base.jaxprs import called
from adaptive.base.source_lines import line_of


@dataclass(frozen=True)
class Same:
    """A value that does not depend on the batch."""


@dataclass(frozen=True)
class PerExample:
    """A value whose `axis` has `examples * k` entries, k for each example in turn."""

    axis: int


@dataclass(frozen=True)
class Total:
    """A sum over examples, times a constant."""


@dataclass(frozen=True)
class Interacting:
    """A value that mixes examples, or may mix them."""

    reason: str


Layout = Same | PerExample | Total | Interacting

SAME, TOTAL = Same(), Total()

_ELEMENTWISE = """
abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy copy_p cos
cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow
is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma population_count pow
real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
sinh sqrt square stop_gradient sub tan tanh xor
"""
_NAMES_OF_ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_LINEAR = frozenset(
    (
        "neg",
        "convert_element_type",
        "reshape",
        "squeeze",
        "unstack",
        "broadcast_in_dim",
        "transpose",
        "copy",
        "copy_p",
        "reduce_sum",
    )
)


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether each element of the result depends only on the same element of the operands."""
    return eqn.primitive.name in _NAMES_OF_ELEMENTWISE


def mixed(eqn: JaxprEqn, why: str) -> Interacting:
    """Return the layout of a value that may mix examples; `why` follows the name of the operation."""
    line = line_of(eqn.source_info)
    return Interacting(f"`{eqn.primitive.name}`{f' ({line})' if line else ''} {why}")


def layouts_of(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> list[Layout]:
    """Return the layouts of an equation's results, given those of its operands."""
    inner = called(eqn, derivatives=True, checkpoints=True)
    if inner is not None:
        return _of_jaxpr(inner, operands, examples)
    bad = next((layout for layout in operands if isinstance(layout, Interacting)), None)
    if bad is None and all(layout == SAME for layout in operands):
        return [SAME] * len(eqn.outvars)
    if eqn.primitive.name == "optimization_barrier":
        return list(operands)
    if examples == 1:  # one example cannot be mixed with others, and any axis is a multiple of one
        return [PerExample(0) if v.aval.shape else TOTAL for v in eqn.outvars]
    found: Layout = bad or _of_results(eqn, operands, examples)
    return [found] * len(eqn.outvars)


def _of_results(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout:
    if TOTAL in operands:
        return _of_totals(eqn, operands)
    if is_elementwise(eqn):
        return _agreed(eqn, operands)
    rule = _RULES.get(eqn.primitive.name)
    if rule is None:
        return mixed(eqn, "is not known to keep examples apart")
    return rule(eqn, operands, examples) or mixed(eqn, "mixes examples")


def _of_jaxpr(closed: ClosedJaxpr, operands: Sequence[Layout], examples: int) -> list[Layout]:
    known: dict[Any, Layout] = dict.fromkeys(closed.jaxpr.constvars, SAME)
    known.update(zip(closed.jaxpr.invars, operands, strict=True))

    def look_up(atoms: Sequence[Any]) -> list[Layout]:
        return [SAME if isinstance(atom, Literal) else known[atom] for atom in atoms]

    for eqn in closed.jaxpr.eqns:
        known.update(zip(eqn.outvars, layouts_of(eqn, look_up(eqn.invars), examples), strict=True))
    return look_up(closed.jaxpr.outvars)


def _of_totals(eqn: JaxprEqn, operands: Sequence[Layout]) -> Layout:
    """Return the layout of an operation on a sum over examples. Only linear operations keep it a sum."""
    name, totals = eqn.primitive.name, sum(layout == TOTAL for layout in operands)
    rows = any(isinstance(layout, PerExample) for layout in operands)
    linear = name in _LINEAR or name in ("add", "sub", "add_any")
    linear |= totals == 1 and (name == "mul" or (name == "div" and operands[0] == TOTAL))
    return TOTAL if linear and not rows else mixed(eqn, "uses a sum over examples")


def _agreed(eqn: JaxprEqn, operands: Sequence[Layout]) -> Layout:
    axes = {layout for layout in operands if isinstance(layout, PerExample)}
    return axes.pop() if len(axes) == 1 else mixed(eqn, "combines each example with others")


# --- rules: the layout, or None where examples are mixed --------------------------------------------------------------


def _axis(operands: Sequence[Layout], index: int = 0) -> int:
    layout = operands[index]
    return layout.axis if isinstance(layout, PerExample) else -1


def _broadcast(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    axis, to = _axis(operands), int(eqn.params["broadcast_dimensions"][_axis(operands)])
    return PerExample(to) if eqn.outvars[0].aval.shape[to] == eqn.invars[0].aval.shape[axis] else None


def _reshape(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    axis, old, new = _axis(operands), eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(old[:axis])
    for to, size in enumerate(new):
        if math.prod(new[:to]) == before and size % examples == 0 and size >= examples:
            return PerExample(to)
    return None


def _squeeze(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    axis = _axis(operands)
    return PerExample(axis - sum(d < axis for d in eqn.params["dimensions"]))


def _unstack(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    axis, along = _axis(operands), eqn.params["axis"]
    return PerExample(axis - (along < axis)) if axis != along else None


def _stack(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    found = _agreed(eqn, operands)
    return PerExample(found.axis + (eqn.params["axis"] <= found.axis)) if isinstance(found, PerExample) else None


def _transpose(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    return PerExample(list(eqn.params["permutation"]).index(_axis(operands)))


def _reduce(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    axis, axes = _axis(operands), eqn.params["axes"]
    if axis in axes:
        return TOTAL if eqn.primitive.name == "reduce_sum" else None
    return PerExample(axis - sum(a < axis for a in axes))


def _elsewhere(param: str) -> Callable[..., Layout | None]:
    """Return a rule for operations along the axes in the equation's parameter `param`: no other axis is affected."""

    def rule(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
        along = eqn.params[param]
        found = _agreed(eqn, operands)
        return found if isinstance(found, PerExample) and found.axis not in _as_tuple(along) else None

    return rule


def _as_tuple(axes: Any) -> tuple[int, ...]:
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _slice(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    axis = _axis(operands)
    whole = eqn.outvars[0].aval.shape[axis] == eqn.invars[0].aval.shape[axis]
    only_first = all(layout == SAME for layout in operands[1:])  # starts and padding
    return PerExample(axis) if axis >= 0 and whole and only_first else None


def _window(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    axis, p = _axis(operands), eqn.params
    alone = p["window_dimensions"][axis] == 1 and p["window_strides"][axis] == 1 and not any(p["padding"][axis])
    return PerExample(axis) if alone and p["base_dilation"][axis] == 1 else None


def _top_k(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    along = eqn.params.get("axis", -1) % len(eqn.invars[0].aval.shape)
    return PerExample(_axis(operands)) if along != _axis(operands) else None


def _dot(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    contract, batch = eqn.params["dimension_numbers"]
    axes = [_axis(operands, side) for side in (0, 1)]
    shapes = [v.aval.shape for v in eqn.invars]
    if min(axes) >= 0:  # both depend on examples
        for dims, result in ((batch, None), (contract, TOTAL)):
            if axes[0] in dims[0] and axes[1] in dims[1]:
                place = list(dims[0]).index(axes[0])
                matched = place == list(dims[1]).index(axes[1])
                return (result or PerExample(place)) if matched else None
        return None
    side = 0 if axes[0] >= 0 else 1
    axis = axes[side]
    if axis in contract[side]:
        return TOTAL
    if axis in batch[side]:
        return PerExample(list(batch[side]).index(axis))
    free = [d for d in range(len(shapes[side])) if d not in contract[side] and d not in batch[side]]
    before = len(shapes[0]) - len(contract[0]) if side else len(batch[0])
    return PerExample(before + free.index(axis))


def _conv(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    numbers = eqn.params["dimension_numbers"]
    apart = operands[1] == SAME and _axis(operands) == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1
    return PerExample(numbers.out_spec[0]) if apart else None


def _gather(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    numbers, (own, index) = eqn.params["dimension_numbers"], [_axis(operands, i) for i in (0, 1)]
    shape = eqn.invars[0].aval.shape
    if index < 0:  # equal indices for all examples: the examples' axis must be taken whole
        taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [d for d in range(len(shape)) if d not in taken]
        whole = own in kept and eqn.params["slice_sizes"][own] == shape[own]
        return PerExample(numbers.offset_dims[kept.index(own)]) if whole else None
    if own >= 0:
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        if (own, index) not in pairs:
            return None
    counting = [d for d in range(len(eqn.outvars[0].aval.shape)) if d not in numbers.offset_dims]
    return PerExample(counting[index]) if index < len(counting) else None


def _random(eqn: JaxprEqn, operands: Sequence[Layout], examples: int) -> Layout | None:
    return _agreed(eqn, operands)


_RULES: dict[str, Callable[..., Layout | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "unstack": _unstack,  # from JAX 0.11 on, as `stack`: before, they were written with slices and concatenations
    "stack": _stack,
    "transpose": _transpose,
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _slice),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _reduce,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _elsewhere("axis")),
    **dict.fromkeys(("sort", "concatenate"), _elsewhere("dimension")),
    "rev": _elsewhere("dimensions"),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    "top_k": _top_k,
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_bits", "random_split", "random_fold_in"), _random),
}
