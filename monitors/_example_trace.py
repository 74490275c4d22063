"""Evaluates a loss equation by equation, and differentiates it at the equations that combine parameters and examples.

These equations are called *uses*. One operand depends only on parameters, another one on examples. A per-example
gradient follows from the operands of the uses and the loss's derivatives with respect to their results. To obtain the
derivatives, a zero is added to each result; one backward pass then yields the gradient and all derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from adaptive.base.jaxprs import bind, called

from ._example_axes import SAME, TOTAL, Interacting, Layout, PerExample, is_elementwise, layouts_of, mixed

_KNOWN = frozenset(("dot_general", "conv_general_dilated", "gather", "concatenate"))


@dataclass(frozen=True, eq=False)
class Node:
    """A value that depends only on parameters: a leaf, or an equation's result."""

    leaf: int = -1
    eqn: JaxprEqn | None = None
    inputs: tuple[Any, ...] = ()  # nodes, and arrays that are constant
    result: int = 0

    def leaves(self) -> frozenset[int]:
        """Return the indices of the parameters' leaves that this value depends on."""
        if self.eqn is None:
            return frozenset((self.leaf,))
        return frozenset().union(*(node.leaves() for node in self.inputs if isinstance(node, Node)))

    def value(self, leaves: Sequence[Any]) -> Any:
        """Compute the value from the parameters' leaves."""
        if self.eqn is None:
            return leaves[self.leaf]
        operands = [node.value(leaves) if isinstance(node, Node) else node for node in self.inputs]
        return bind(self.eqn, operands)[self.result]


class TrackedValue(NamedTuple):
    """A value in the evaluation of a loss, with its layout and its dependence on parameters."""

    value: Any
    layout: Layout = SAME
    node: Node | None = None  # if it depends on parameters alone


class Use(NamedTuple):
    """An equation that combines parameters and examples."""

    eqn: JaxprEqn
    operands: tuple[TrackedValue, ...]
    axis: int  # of the examples, in the result


class Interpreter:
    """Evaluates a loss's equations with a zero added to the result of each use.

    Attributes:
      uses: the uses found so far.
    """

    def __init__(self, examples: int, zeros: Sequence[jax.Array] | None = None):
        self._examples, self._zeros = examples, zeros
        self.uses: list[Use] = []

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[TrackedValue]) -> list[TrackedValue]:
        """Return the results of a jaxpr. Jitted and checkpointed functions are evaluated in place."""
        known = dict(zip(jaxpr.constvars, map(TrackedValue, consts), strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def look_up(atoms: Sequence[Any]) -> list[TrackedValue]:
            return [TrackedValue(atom.val) if isinstance(atom, Literal) else known[atom] for atom in atoms]

        for eqn in jaxpr.eqns:
            operands = look_up(eqn.invars)
            inner = called(eqn, checkpoints=True)
            results = self._one(eqn, operands) if inner is None else self.run(inner.jaxpr, inner.consts, operands)
            known.update(zip(eqn.outvars, results, strict=True))
        return look_up(jaxpr.outvars)

    def _one(self, eqn: JaxprEqn, operands: list[TrackedValue]) -> list[TrackedValue]:
        values = bind(eqn, [operand.value for operand in operands])
        layouts = layouts_of(eqn, [operand.layout for operand in operands], self._examples)
        if all(operand.node is None for operand in operands):
            return list(map(TrackedValue, values, layouts))
        if all(operand.layout == SAME for operand in operands):
            inputs = tuple(operand.value if operand.node is None else operand.node for operand in operands)
            return [TrackedValue(value, SAME, Node(-1, eqn, inputs, i)) for i, value in enumerate(values)]
        (layout, *_), (value, *rest) = layouts, values
        if isinstance(layout, PerExample) and not rest and (is_elementwise(eqn) or eqn.primitive.name in _KNOWN):
            if not jnp.issubdtype(value.dtype, jnp.inexact):  # a comparison, without derivatives
                return [TrackedValue(value, layout)]
            value = value + (jnp.zeros_like(value) if self._zeros is None else self._zeros[len(self.uses)])
            self.uses.append(Use(eqn, tuple(operands), layout.axis))
            return [TrackedValue(value, layout)]
        return [TrackedValue(v, _refused(eqn, operands, layout)) for v in values]


def _refused(eqn: JaxprEqn, operands: Sequence[TrackedValue], layout: Layout) -> Interacting:
    if isinstance(layout, Interacting):
        return layout
    if any(operand.layout == TOTAL for operand in operands):
        return mixed(eqn, "joins parameters and a sum over examples, such as a penalty on weights")
    return mixed(eqn, "uses parameters in a way whose gradient per example is not known")


class DifferentiatedLoss(NamedTuple):
    """The results of differentiating a loss, from which per-example gradients follow."""

    outputs: Any  # what the loss function returns
    grads: list[jax.Array]  # by the leaves of the parameters
    uses: list[Use]  # of the backward pass: operands are values of this trace
    derivatives: list[jax.Array]  # of the loss, by each use's result


def differentiate(
    function: Callable[..., Any], leaves: Sequence[Any], batch: Sequence[Any], examples: int
) -> DifferentiatedLoss:
    """Differentiate `function(leaves, batch) -> (loss, aux)` with respect to the leaves and the result of each use.

    Raises:
      MixedExamples: the loss is not a sum of terms that depend on one example each.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(list(leaves), list(batch))
    out_tree = jax.tree.structure(shape)

    def run(leaves: Sequence[Any], zeros: Sequence[Any] | None) -> tuple[list[TrackedValue], list[Use]]:
        interpreter = Interpreter(examples, zeros)
        arguments = [TrackedValue(leaf, SAME, Node(i)) for i, leaf in enumerate(leaves)]
        arguments += [TrackedValue(rows, PerExample(0)) for rows in batch]
        return interpreter.run(closed.jaxpr, closed.consts, arguments), interpreter.uses

    def shapes(leaves: Sequence[Any]) -> list[Any]:
        (loss, *_), uses = run(leaves, None)
        if loss.layout != TOTAL:
            raise MixedExamples(loss.layout)
        return [jnp.zeros(use.eqn.outvars[0].aval.shape, use.eqn.outvars[0].aval.dtype) for use in uses]

    zeros = [jnp.zeros(z.shape, z.dtype) for z in jax.eval_shape(shapes, list(leaves))]
    nodes: list[Use] = []

    def perturbed(leaves: Sequence[Any], zeros: Sequence[Any]) -> tuple[Any, Any]:
        results, uses = run(leaves, zeros)
        nodes[:] = uses
        values = [[operand.value for operand in use.operands] for use in uses]
        return results[0].value, ([result.value for result in results], values)

    (_, (flat, values)), (grads, derivatives) = jax.value_and_grad(perturbed, argnums=(0, 1), has_aux=True)(
        list(leaves), zeros
    )
    uses = [
        use._replace(operands=tuple(o._replace(value=v) for o, v in zip(use.operands, row, strict=True)))
        for use, row in zip(nodes, values, strict=True)
    ]
    return DifferentiatedLoss(jax.tree.unflatten(out_tree, flat), grads, uses, derivatives)


class MixedExamples(ValueError):
    """The loss is not a sum over examples, so it has no per-example gradients. `layout`: the loss's layout."""

    def __init__(self, layout: Layout):
        super().__init__(str(layout))
        self.layout = layout
