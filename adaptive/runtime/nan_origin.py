"""Whose contributions to a message are not finite, and which line of the driver computed the first such value.

Compiled programs return only the values that later segments need. So if a worker's contributions are not finite, its
step is computed again up to them, equation by equation, which takes long and is done only for errors. Each value that
is not finite inherits the origin of the first operand that is not either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.jaxprs import JaxprEqn, Var, has_effects
from adaptive.data.stream import Share
from adaptive.graph.plan import Plan
from adaptive.graph.trace import Atom, describe, evaluate, operands_of
from adaptive.operators.peer_read import publishes
from adaptive.operators.sources import Reading, source_p

from .finite import Culprit, Trouble, describe_trouble
from .message import unpack
from .schedule import Schedule, Sent
from .segment import apply
from .step_context import StepContext


def find_trouble(
    ctx: StepContext, schedule: Schedule, message: Sent, share: Share, readings: Sequence[Reading], *, search: bool
) -> Trouble:
    """Determine the workers whose contributions to a message are not finite. All processes call it; communicates.

    Args:
      schedule: still has the step's values.
      search: whether to determine also the driver's lines that computed the values, which takes seconds.
    """
    check, own = ctx.finite_checks[message.number], list[Culprit]()
    for local_index, (worker, parts) in enumerate(zip(ctx.world.workers, map(getitem, *message.parts), strict=True)):
        found = check.of_worker(parts) if schedule.microbatches[local_index] else []
        if found:
            origin = ""
            if search and not own:
                origin = _origin(ctx, schedule, message.number, local_index, found, share, readings[local_index])
            own.append(Culprit(worker, tuple(found), origin))
    everyone = ctx.world.all_gather_bytes(json.dumps(own).encode(), "whose contributions are not finite")
    culprits = sorted(
        Culprit(w, tuple(numbers), origin) for sent in everyone for w, numbers, origin in json.loads(sent)
    )
    reduced = next(map(getitem, *message.arrives))
    return describe_trouble(check.layout.contributions, check.of_all(reduced), culprits)


def _origin(
    ctx: StepContext,
    schedule: Schedule,
    number: int,
    local_index: int,
    contributions: Sequence[int],
    share: Share,
    reading: Reading,
) -> str:
    """Return a description of the origin of a worker's contributions that are not finite."""
    start, taking_part, microbatches = 0, jnp.asarray(reading.taking_part), schedule.microbatches[local_index]
    floats, ints = map(jnp.asarray, ctx.feed.measure(reading, len(microbatches)))
    try:
        for size in microbatches:
            plan = ctx.plans(size)
            graph = plan.graph
            known = dict(zip(graph.state_vars, ctx.workers.states[local_index], strict=True)) | graph.consts
            for op_state, leaves in zip(plan.op_states, ctx.workers.op_states[local_index], strict=True):
                known.update(zip(op_state.values, leaves, strict=True))
            scalars = ctx.feed.values_of_microbatch(floats, ints, size, start)
            for eqn in graph.eqns:
                if eqn.primitive is source_p and eqn.params["source"].name in scalars:
                    known[eqn.outvars[0]] = scalars[eqn.params["source"].name].astype(eqn.outvars[0].aval.dtype)
            batch = [leaf[start : start + size] for leaf in jax.tree.leaves(share.batches[local_index])]
            known.update(zip(graph.batch_vars, batch, strict=True))
            for level in schedule.levels[: plan.messages[number].level]:
                for before in level.messages:
                    values, places = before.arrives
                    parts = values[local_index][places[local_index]]
                    result = unpack(ctx.layouts[before.number], parts, worker=ints[0], taking_part=taking_part)
                    known.update((c.result, result(i)) for i, c in enumerate(plan.messages[before.number]))
            sent = [plan.messages[number][i] for i in contributions]
            atoms = [a for c in sent for a in (c.value, c.weight) if a is not None]
            found = nan_origin(plan, known, atoms, taking_part)
            if found:
                return found
            start += size
    except Exception as error:  # the other processes wait for this process's result
        return f"their origin could not be found: {type(error).__name__}: {error}".rstrip(".")
    return "each is finite, but its product with the weight, or the sum over microbatches, is not"


_FINITE, _INFINITE, _NAN = range(3)
_KINDS = ("finite", "infinities", "NaNs")


class _Origin(NamedTuple):
    """What kind of values a variable holds that are not finite, and where they come from."""

    kind: int
    text: str  # "the first NaNs come from `log` (driver.py:12)", "batch['x'] holds NaNs"
    place: str  # "from `log` (driver.py:12)", "in batch['x']"


def nan_origin(plan: Plan, known: Mapping[Var, Any], atoms: Sequence[Atom], taking_part: jax.Array) -> str:
    """Return a description of the origin of the first of `atoms` that is not finite; "" if all are finite.

    Args:
      known: values of all inputs of the graph: state, batch, constants, operator states, sources, earlier messages.
    """
    reached = list(plan.graph.upstream(atoms, known.__contains__))
    wanted = {id(plan.graph.producer[var]) for var in reached if var not in known}
    eqns = [eqn for eqn in plan.graph.eqns if id(eqn) in wanted]
    effect = next((eqn for eqn in eqns if has_effects(eqn) or publishes(eqn)), None)
    if effect is not None:
        raise NotImplementedError(f"{_operation(effect)} has an effect, and is not repeated")
    values, found = {var: known[var] for var in reached if var in known}, dict[Var, _Origin]()
    for var, value in values.items():
        if kind := _kind(value):
            name = _name(plan, var)
            found[var] = _Origin(kind, f"{name} holds {_KINDS[kind]}", f"in {name}")
    last = {a: eqn for eqn in eqns for a in operands_of(eqn) if isinstance(a, Var)}

    def compute(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        results, read = apply(eqn, operands, taking_part), [a for a in operands_of(eqn) if isinstance(a, Var)]
        bad = [found[a] for a in read if a in found]
        for var, kind in zip(eqn.outvars, map(_kind, results), strict=True):
            if kind:
                place = f"from {_operation(eqn)}"
                of = f", of infinities {bad[0].place}" if bad else ""  # a NaN computed from earlier infinities
                new = _Origin(kind, f"the first {_KINDS[kind]} come {place}{of}", place)
                found[var] = next((origin for origin in bad if origin.kind >= kind), new)
        for var in read:
            if last[var] is eqn:
                values.pop(var, None)
        return results

    evaluate(eqns, values, compute)
    return next((found[atom].text for atom in atoms if isinstance(atom, Var) and atom in found), "")


def _name(plan: Plan, var: Var) -> str:
    """Return the name of an input of the graph."""
    graph = plan.graph
    for names, variables in ((graph.batch_names, graph.batch_vars), (graph.state_names, graph.state_vars)):
        if var in variables:
            return names[variables.index(var)]
    eqn = graph.producer.get(var)
    return "a constant of the driver" if eqn is None else f"{describe(eqn)}{at(line_of(eqn.source_info))}"


def _operation(eqn: JaxprEqn) -> str:
    return f"`{eqn.primitive.name}`{at(line_of(eqn.source_info))}"


def _kind(value: Any) -> int:
    x = value if hasattr(value, "dtype") else np.asarray(value)
    if not jnp.issubdtype(x.dtype, np.inexact):
        return _FINITE
    x = np.asarray(x)
    return _NAN if np.isnan(x).any() else _INFINITE if np.isinf(x).any() else _FINITE
