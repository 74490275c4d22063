"""The first batch sizes, and the plan for the largest of them, which depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

import numpy as np

from adaptive.base.decision import Limits
from adaptive.base.errors import BatchSizeError, DriverError
from adaptive.base.split import most_of_each
from adaptive.base.values.ambient import describe_settings
from adaptive.base.values.tree_paths import leaf_names
from adaptive.base.world import World
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.build_agreement import check_same_build, digest_of_plan, digest_of_tree
from adaptive.data.rows import Data
from adaptive.data.same_data import digests_of_data
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.operators.minibatches import NotEqualPartsError

from .arguments import Options, StateForm


def first_plan(
    planner: Planner, data: Data, world: World, members: Sequence[int], options: Options
) -> tuple[BatchSizes, Plan]:
    """Return the sizes of the first step, and a plan for the largest of them.

    The trace of the driver determines the required multiple of batch sizes, but needs a size itself. If that isn't a
    multiple, sizes and plan are computed again. `members` are the occupied worker slots: the caller reads them once for
    all parts of the program, because processes may be lost while it is built.

    Raises:
      DriverError: the driver is invalid, or its batches cannot be split, and an option bounds microbatches.
    """
    multiple = 1 if world.local_mesh is None else world.local_mesh.granule
    microbatch = options.microbatch
    while True:
        limits = _limits(data, world.capacity, None if options.is_auto else options.max_local_batch, multiple)
        sizes = BatchSizes(options.global_batch, options.shares, limits, members=members)
        largest = max(sizes.current)  # of all workers, so that all processes have the same plan
        try:
            plan = planner.begin(min(largest, microbatch or largest))
            found = plan.multiple
            if microbatch is not None and not plan.splittable:
                raise _no_microbatches(microbatch, f"{plan.unsplittable[0]}.")
            if options.is_auto and not plan.splittable:
                raise DriverError(
                    'max_local_batch="auto" bounds microbatches by memory, and this driver\'s batches cannot be split '
                    f"into microbatches: {plan.unsplittable[0]}. Write the most examples that a worker can hold:  "
                    "max_local_batch=64"
                )
            if multiple % found == 0:
                sizes.must_take(slot for message in plan.messages for c in message for slot in c.how.needed)
                return sizes, plan
        except NotEqualPartsError as error:
            if microbatch is not None:
                raise _no_microbatches(microbatch, str(error)) from None
            found = error.multiple
        multiple = lcm(multiple, found)


def plan_for_capacity(planner: Planner, limits: Limits, options: Options) -> Plan:
    """Return the plan for an equal share of the global batch in every worker slot, or else the first plan, if the
    driver cannot be traced for that size.
    """
    size = options.global_batch // len(limits.upper) // limits.multiple * limits.multiple
    try:
        return planner(min(max(size, limits.multiple), options.microbatch or size, *limits.upper))
    except Exception:  # raised by the driver, which may support one batch size only
        return planner.reference


def _limits(data: Data, workers: int, max_local_batch: int | Sequence[int] | None, multiple: int) -> Limits:
    examples = len(data)
    largest = [examples] * workers if max_local_batch is None else most_of_each(max_local_batch, workers)
    lengths = np.broadcast_to(data.lengths, (workers,))
    there = [min(most, int(length)) for most, length in zip(largest, lengths, strict=True)]
    for worker, most in enumerate(there):
        if most < multiple:
            raise BatchSizeError(
                f"worker {worker} can have at most {most} examples (max_local_batch, or the size of the data), but the "
                f"driver's minibatches or its worker's mesh need multiples of {multiple}."
            )
    upper = tuple(most // multiple * multiple for most in there)
    return Limits((multiple,) * workers, upper, multiple=multiple, examples=examples)


def _no_microbatches(microbatch: int, why: str) -> DriverError:
    return DriverError(f"microbatch={microbatch}: this driver's batches cannot be split into microbatches: {why}")


def check_alike(
    world: World,
    name: str,
    form: StateForm,
    leaves: Sequence[Any],
    data: Data,
    plan: Plan,
    settings: dict[str, Any],
    whole: Callable[[], Plan],
) -> dict[str, str]:
    """Check that all processes build the same program. Raises a DisagreementError on all if not. Communicates.

    Returns:
      Digests with which a process that is spawned later must agree. They do not depend on the current members, and
      `whole` returns a plan that does not either.
    """
    if world.processes == 1 and not world.spawns:
        return {}
    built = {setting: repr(value) for setting, value in settings.items()}
    built.update(digests_of_data(data))
    labelled = list(zip(leaf_names(form.shapes, "state"), leaves, strict=True))
    built.update((label, digest_of_tree(leaf)) for i, (label, leaf) in enumerate(labelled) if i not in form.local)
    if world.local_mesh is not None:  # messages are exchanged by part, and parts of two shardings can have one shape
        specs = ((label, getattr(getattr(leaf, "sharding", None), "spec", None)) for label, leaf in labelled)
        built.update((f"the sharding of {label}", str(spec)) for label, spec in specs)
    check_same_build(world, built, plan, f"building {name}")
    lasting = {what: digest for what, digest in built.items() if what != "batch sizes"}
    return {**describe_settings(), **lasting, "driver": digest_of_plan(whole())} if world.spawns else {}
