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

from .finite import Culprit, find_together
from .message import unpack
from .microbatches import Microbatches
from .nan_origin import nan_origin
from .outcome import Outcome
from .step_plan import StepContext


class FailedStep(NamedTuple):
    """The data of a step that ended at a message that is not finite.

    Attributes:
      share, readings, microbatches: see `GeneralStep`.
      packed: the parts that each worker has packed for the messages of the last level, by local index.
      messages: the reduced parts of earlier messages, by message and local index.
      sent: the numbers of the messages that were sent.
      seconds: seconds of each worker's microbatches, by local index.
    """

    share: Share
    readings: Sequence[Reading]
    microbatches: Sequence[Microbatches]
    packed: Sequence[Sequence[jax.Array]]
    messages: Mapping[int, Sequence[Sequence[jax.Array]]]
    sent: Sequence[int]
    seconds: list[float]


def give_up(
    ctx: StepContext, failed: FailedStep, number: int, reduced: Sequence[jax.Array], *, search: bool
) -> Outcome:
    """Determine the workers whose contributions to message `number` are not finite. All processes call it;
    communicates.

    Args:
      reduced: the message's reduced parts.
      search: whether to determine also the driver's lines that computed the values, which takes seconds.

    Returns:
      The outcome of a step without a commit.
    """
    steps, plan = ctx.step_plan, ctx.step_plan.plan
    message, check = plan.messages[number], steps.finite_checks[number]
    own: list[Culprit] = []
    for local_index, worker in enumerate(ctx.world.workers):
        if not failed.microbatches[local_index]:
            continue
        found = check.of_worker(failed.packed[local_index][steps.part_slices[number]])
        if found:
            origin = _origin(ctx, failed, local_index, number, found) if search and not own else ""
            own.append(Culprit(worker, tuple(found), origin))
    trouble = find_together(ctx.world, message.contributions, check.of_all(reduced), own)
    seconds = failed.seconds if message.level == plan.levels - 1 else [float("nan")] * len(failed.seconds)
    sent = len(failed.sent), sum(steps.layouts[n].nbytes for n in failed.sent)
    return Outcome([], [], {}, seconds, list(failed.microbatches), *sent, trouble)


def _origin(ctx: StepContext, failed: FailedStep, local_index: int, message: int, numbers: Sequence[int]) -> str:
    """Return a description of the origin of a worker's values that are not finite.

    Args:
      numbers: the contributions, by their numbers in the message.
    """
    start, taking_part = 0, jnp.asarray(failed.readings[local_index].taking_part)
    try:
        for size in failed.microbatches[local_index]:
            plan = ctx.step_plan.plans(size)
            sent = [plan.messages[message][i] for i in numbers]
            atoms = [a for c in sent for a in (c.value, c.weight) if a is not None]
            known = _given_values(ctx, failed, plan, local_index, plan.messages[message].level, start, size)
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
        parts = failed.messages[earlier][local_index]
        arrived = unpack(steps.layouts[earlier], parts, range(len(results)), worker=vectors[1][0])
        known.update(zip(results, arrived, strict=True))
    return known
