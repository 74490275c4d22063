"""Diagnosis of a step that was not committed because a message is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from adaptive.data.stream import Share
from adaptive.graph.plan import Plan
from adaptive.operators.sources import Reading, source_p

from .finite import Culprit, Trouble, find_together
from .message import unpack
from .microbatches import Microbatches
from .nan_origin import nan_origin
from .step_plan import StepContext


class FailedStep(NamedTuple):
    """The data of a step that ended at a message that is not finite.

    Attributes:
      share, readings, microbatches: see `HostStep`.
      number: the number of the message.
      parts: the message's parts that each worker has packed, by local index.
      reduced: its reduced parts.
      earlier: the reduced parts of messages of earlier levels, by message and local index.
    """

    share: Share
    readings: Sequence[Reading]
    microbatches: Sequence[Microbatches]
    number: int
    parts: Sequence[Sequence[jax.Array]]
    reduced: Sequence[jax.Array]
    earlier: Mapping[int, Sequence[Sequence[jax.Array]]]


def give_up(ctx: StepContext, failed: FailedStep, *, search: bool) -> Trouble:
    """Determine the workers whose contributions are not finite. All processes call it; communicates.

    Args:
      search: whether to determine also the driver's lines that computed the values, which takes seconds.
    """
    steps = ctx.step_plan
    message, check = steps.plan.messages[failed.number], steps.finite_checks[failed.number]
    own: list[Culprit] = []
    for local_index, worker in enumerate(ctx.world.workers):
        found = check.of_worker(failed.parts[local_index]) if failed.microbatches[local_index] else []
        if found:
            origin = _origin(ctx, failed, local_index, found) if search and not own else ""
            own.append(Culprit(worker, tuple(found), origin))
    return find_together(ctx.world, message.contributions, check.of_all(failed.reduced), own)


def _origin(ctx: StepContext, failed: FailedStep, local_index: int, numbers: Sequence[int]) -> str:
    """Return a description of the origin of a worker's values that are not finite.

    Args:
      numbers: the contributions, by their numbers in the message.
    """
    start, taking_part = 0, jnp.asarray(failed.readings[local_index].taking_part)
    try:
        for size in failed.microbatches[local_index]:
            plan = ctx.step_plan.plans(size)
            sent = [plan.messages[failed.number][i] for i in numbers]
            atoms = [a for c in sent for a in (c.value, c.weight) if a is not None]
            known = _given_values(ctx, failed, plan, local_index, plan.messages[failed.number].level, start, size)
            found = nan_origin(plan, known, atoms, taking_part)
            if found:
                return found
            start += size
    except Exception as error:  # the other processes wait for this process's result
        return f"their origin could not be found: {type(error).__name__}: {error}".rstrip(".")
    return "each is finite, but its product with the weight, or the sum over microbatches, is not"


def _given_values(
    ctx: StepContext, failed: FailedStep, plan: Plan, local_index: int, level: int, start: int, size: int
) -> dict[Var, Any]:
    """Return the inputs of a microbatch, by the variables of its graph.

    Args:
      plan: the plan for microbatches of `size` examples.
      level: the level of the message that is not finite; messages of earlier levels have arrived.
      start: index of the microbatch's first example in the worker's batch.
    """
    steps, graph, reading = ctx.step_plan, plan.graph, failed.readings[local_index]
    n = len(failed.microbatches[local_index])
    vectors = steps.feed.measure_step(reading, n)
    if n > 1:
        vectors = steps.feed.for_microbatch(vectors, reading, start, size)
    scalars = steps.feed.values(*map(jnp.asarray, vectors))
    known = dict(zip(graph.state_vars, ctx.workers.states[local_index], strict=True)) | graph.consts
    leaves = [leaf[start : start + size] for leaf in jax.tree.leaves(failed.share.batches[local_index])]
    known.update(zip(graph.batch_vars, leaves, strict=True))
    for op_state, values in zip(plan.op_states, ctx.workers.op_states[local_index], strict=True):
        known.update(zip(op_state.values, values, strict=True))
    for eqn in graph.eqns:
        if eqn.primitive is source_p and eqn.params["source"].name in scalars:
            known[eqn.outvars[0]] = scalars[eqn.params["source"].name].astype(eqn.outvars[0].aval.dtype)
    for earlier in (number for number, m in enumerate(plan.messages) if m.level < level):
        results = [c.result for c in plan.messages[earlier]]
        parts = failed.earlier[earlier][local_index]
        arrived = unpack(steps.layouts[earlier], parts, range(len(results)), worker=vectors[1][0])
        known.update(zip(results, arrived, strict=True))
    return known
