"""Run the graph of a function of a driver on several workers, equation by equation and with no program.

What the operators mean, in its plainest form: all workers do the same equation; a collective sees what all have; slots
are read before they are written and keep what was written. A micro-batch counts as a worker here, as it should.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from adaptive.operators.collectives import Collective, collective_p
from adaptive.operators.collectives import operands as operands_of
from adaptive.operators.context import trace_as
from adaptive.operators.operator_state import state_read_p, state_write_p
from adaptive.operators.sources import Reading, source_p


def reading(**known: Any) -> Reading:
    """A reading in which only what a test cares about is out of the ordinary."""
    nothing = {"step": 0, "seed": 0, "worker": 0, "global_batch": 1, "batch_size": 1, "examples": 1, "microbatches": 1}
    return Reading(**{**nothing, "offset": 0, "compute_seconds": np.nan, "iteration_seconds": np.nan, **known})


def graph(function: Callable, *args: Any, workers: int = 4) -> ClosedJaxpr:
    """The function's graph, as it would be part of a driver's."""
    with trace_as(workers, 8):
        return jax.make_jaxpr(lambda *a: function(*a))(*args)  # a new function: traces are cached by function


def operators(closed: ClosedJaxpr) -> list[str]:
    """Its collectives, slots and hooks, in order; collectives with the shapes of what they send, sources by name."""
    found = []
    for eqn in _equations(closed):
        match eqn.primitive.name:
            case "collective":
                shapes = [str(v.aval.shape) for v in operands_of(eqn.invars, eqn.params).values]
                found.append(f"{eqn.params['how'].about} {' '.join(shapes)}")
            case "source":
                found.append(f"source {eqn.params['source'].name}")
            case "state_read":
                found.append(f"state {eqn.params['label']}")
            case "hook":
                found.append("hook")
    return found


def _equations(closed: ClosedJaxpr) -> Iterator[JaxprEqn]:
    for eqn in closed.jaxpr.eqns:
        yield eqn
        if eqn.primitive.name == "jit":
            yield from _equations(eqn.params["jaxpr"])


class Lockstep:
    """A function of a driver on several workers.

    `step(rows, readings)` takes each worker's arguments and reading; it returns each worker's result.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._traced: dict[Any, tuple] = {}  # by the number of workers and the types of their arguments
        self._slots: dict[int, list[list[Any]]] = {}

    def step(self, rows: Sequence[tuple], readings: Sequence[Reading]) -> list[Any]:
        leaves, tree = jax.tree.flatten(rows[0])
        kind = len(rows), tree, tuple((type(leaf), jax.typeof(leaf)) for leaf in leaves)
        if kind not in self._traced:
            with trace_as(len(rows), 8):
                traced = jax.make_jaxpr(lambda *a: self._function(*a), return_shape=True)(*rows[0])
            self._traced[kind] = traced
        closed, shapes = self._traced[kind]
        self._handles = itertools.count()  # slots are numbered as they are read
        results = self._run(closed, [jax.tree.leaves(row) for row in rows], readings)
        return [jax.tree.unflatten(jax.tree.structure(shapes), worker) for worker in results]

    def _run(self, closed: ClosedJaxpr, inputs: list[list[Any]], readings: Sequence[Reading]) -> list[list[Any]]:
        envs = [dict(zip(closed.jaxpr.invars, row, strict=True)) for row in inputs]
        for env in envs:
            env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))

        def look_up(env: dict, atoms: Sequence[Any]) -> list[Any]:
            return [a.val if isinstance(a, Literal) else env[a] for a in atoms]

        for eqn in closed.jaxpr.eqns:
            operands = [look_up(env, eqn.invars) for env in envs]
            for env, results in zip(envs, self._carry_out(eqn, operands, readings), strict=True):
                env.update(zip(eqn.outvars, results, strict=True))
        return [look_up(env, closed.jaxpr.outvars) for env in envs]

    def _carry_out(self, eqn: JaxprEqn, operands: list[list[Any]], readings: Sequence[Reading]) -> list[list[Any]]:
        if eqn.primitive is source_p:
            source = eqn.params["source"]
            return [[np.asarray(source.read(r), source.dtype)] for r in readings]
        if eqn.primitive is collective_p:
            return [_combine(eqn.params, operands)] * len(operands)
        if eqn.primitive is state_read_p:
            handle = next(self._handles)
            kept = self._slots.setdefault(handle, [eqn.params["init"].leaves] * len(operands))
            return [[handle, *leaves] for leaves in kept]
        if eqn.primitive is state_write_p:
            self._slots[operands[0][0]] = [row[1:] for row in operands]
            return [[] for _ in operands]
        if eqn.primitive.name == "jit":
            return self._run(eqn.params["jaxpr"], operands, readings)
        params = eqn.primitive.get_bind_params(eqn.params)
        results = [eqn.primitive.bind(*row, **params) for row in operands]
        return results if eqn.primitive.multiple_results else [[r] for r in results]


def _combine(params: dict[str, Any], operands: list[list[Any]]) -> list[Any]:
    n = len(operands_of(operands[0], params).values)
    columns = [np.stack([np.asarray(row[j]) for row in operands]) for j in range(n)]
    how = params["how"]
    plain = type(how).encode is Collective.encode and type(how).decode is Collective.decode
    if not plain:
        raise NotImplementedError(f"{how.name} encodes what it sends: test it in a program over a LocalWorld")
    if how.weighted:
        weights = np.asarray([row[-1] for row in operands], np.float64)
        return [np.average(c, axis=0, weights=weights).astype(c.dtype) for c in columns]
    return [getattr(np, how.op)(c, axis=0).astype(c.dtype) for c in columns]
