"""The plan of a step, and the memory that it needs, as text, for `Program.explain`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from adaptive.base.process.source_lines import at, name_workers
from adaptive.base.world import World
from adaptive.control.batch_sizes import BatchSizes
from adaptive.data.rows import Data, Shards
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Message, Plan, Segment
from adaptive.observe.scalars import counted
from adaptive.runtime.engine import Engine
from adaptive.runtime.kernels.memory_bound import temporary_bytes
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.message import Layout
from adaptive.runtime.step_context import bytes_on_device, bytes_per_execution


def explain(engine: Engine, sizes: BatchSizes, data: Data, world: World) -> str:
    """Return a description of a program's plan, input, kernels and memory, one line each."""
    shards = data.lengths if isinstance(data, Shards) else ()
    bound = engine.kernels.memory
    whose = "a worker" if world.local_mesh is None else "each device of a worker"
    needed = memory_needed(engine, data, sizes.current)
    total = sum(n.nbytes for n in needed) / _MIB
    return "\n".join(
        [
            explain_plan(engine.plan, engine.layouts, sizes.current, shards, not sizes.fixed_by),
            *_unused_devices(world),
            *(f"input    {line}" for line in data.notes),
            *([] if bound is None else [f"kernels  {bound.in_words}"]),
            f"memory   {total:,.1f} MiB for {whose} in a step, without the interpreter and compiled code",
            *(f"    {n.what:<18} {n.nbytes / _MIB:>10,.1f} MiB   {n.details}" for n in needed),
        ]
    )


def _unused_devices(world: World) -> Iterator[str]:
    """Yield a line if a program has the default world, of one worker, in a process with several devices."""
    others = len(jax.local_devices())
    if type(world) is LocalWorld and world.capacity == 1 and others > 1:
        yield f"world    1 worker on {world.devices[0]}; this process has {others} devices: world=comm.world() uses all"


def explain_plan(
    plan: Plan,
    layouts: Sequence[Layout],
    batch_sizes: Sequence[int],
    shards: Sequence[int] = (),
    resizable: bool = True,
) -> str:
    """Return lines on segments, messages and their bytes, hooks and operator states, in the order of a step.

    Args:
      shards: number of examples in each worker's own data; empty if all share one data set.
    """
    graph = plan.graph
    lines = [
        f"driver {graph.name!r}: {len(graph.eqns)} equations, {_leaves(len(graph.state_names))} of state",
        f"{counted(len(batch_sizes), 'worker')}, global batch {sum(batch_sizes)} = {_sizes(batch_sizes)}",
    ]
    out = [worker for worker, size in enumerate(batch_sizes) if size == 0]
    if out:
        lines.append(f"no examples for {name_workers(out)}")
    if shards:
        lines.append(f"each worker has its own data: {sum(shards)} examples = {_sizes(shards)}")
    lines.append("")
    for level in range(plan.levels + 1):
        if level in plan.prologues:
            lines.append(f"segment  once per step          {_work(plan.prologues[level])}")
        if level in plan.microbatches:
            sizes = "bucket size" if plan.splittable and resizable else "batch size"
            lines.append(
                f"segment  per microbatch         {_work(plan.microbatches[level])}; compiled for each {sizes}"
            )
        for number in plan.sent_at(level):
            lines += _message(number, plan.messages[number], layouts[number])
    lines.append(f"segment  once, after the last  {_work(plan.final)}; compiled once")
    for h in plan.hooks:
        often = "every step" if h.hook.every == 1 else f"every {h.hook.every} steps"
        lines.append(f"hook     {h.hook.name!r} {often}{at(h.line)}, reads {counted(len(h.values), 'value')}")
    lines += [
        f"state    {s.name}{at(s.line)}: {sum(a.size for a in s.init)} numbers"
        + ("" if s.scope == Scope.ALL else ", different on each worker")
        for s in plan.op_states
    ]
    measured = [s.name for s in plan.sources if s.scope != "microbatch"]
    if measured:
        lines.append(f"sources  {', '.join(measured)}")
    if not resizable:
        lines.append(f"batch sizes are fixed ({plan.one_size or 'resizable=False'}): no other kernels are compiled")
    elif plan.splittable:
        lines.append("a local batch may run as several microbatches: any size is made of buckets (powers of two)")
    else:
        lines.append(
            f"a local batch runs as one microbatch, and every new size is compiled: {'; '.join(plan.unsplittable)}"
        )
    if plan.multiple > 1:
        lines.append(f"a local batch is a multiple of {plan.multiple} examples")
    return "\n".join(lines)


def _sizes(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1 and len(sizes) > 1:
        return f"{len(sizes)} x {sizes[0]}"
    return " + ".join(map(str, sizes)) if len(sizes) <= 16 else f"{min(sizes)} … {max(sizes)} each"


def _work(segment: Segment) -> str:
    labels, reads = {"state": "state", "batch": "batch", "op_state": "operator states"}, []
    for kind, label in labels.items():
        reads += [label] * any(o.kind == kind for _, o in segment.inputs)
    reads += [f"message {i + 1}" for i in sorted({o.index for _, o in segment.inputs if o.kind == "message"})]
    return f"{counted(len(segment.eqns), 'equation')} on {', '.join(reads) or 'nothing'}"


def _message(number: int, message: Message, layout: Layout) -> Iterator[str]:
    whole, buffers = _bytes(layout.nbytes), counted(len(layout.parts), "buffer")
    if message.travels:
        sometimes = "" if message.gate is None else ", in steps in which its when= is true"
        yield f"message {number + 1}  {whole} from each worker, {buffers}{sometimes}"
    else:
        yield f"message {number + 1}  not sent: {whole} that each worker reduces by itself, {buffers}"
    groups: dict[tuple[str, str], list[int]] = {}  # contributions of one kind and line
    for number, c in enumerate(layout.contributions):
        groups.setdefault((c.how.label, c.line), []).append(number)
    for (kind, line), group in groups.items():
        placed = [layout.entries[i] for i in group]
        size = sum(entry.size * layout.parts[entry.part].itemsize for entry in placed)
        names = [layout.contributions[i].name for i in group if layout.contributions[i].name]
        shown = (names[0] if len(names) == 1 else f"{names[0]} …") if names else "a value"
        yield _row(kind, _leaves(len(group)), size, shown + at(line))
    weights, itemsize = len({w.offset for w in layout.weights if w is not None}), layout.parts[0].dtype.itemsize
    yield _row("weights", str(weights), weights * itemsize, "by which means are divided")
    if layout.status:
        what = "of workers, new sizes, and joining workers"
        yield _row("status", str(layout.status), layout.status * itemsize, what)


def _leaves(number: int) -> str:
    return "1 leaf" if number == 1 else f"{number} leaves"


def _row(kind: str, count: str, nbytes: int, what: str) -> str:
    return f"    {kind:<14} {count:<10} {_bytes(nbytes):>10}   {what}"


def _bytes(n: int) -> str:
    return f"{n:,} B" if n < 100_000 else f"{n / 1e3:,.0f} kB" if n < 10_000_000 else f"{n / 1e6:,.1f} MB"


_MIB = 1 << 20
_BATCHES = 2  # the step's batch, and the next one, which is fetched during the step


class Needed(NamedTuple):
    """Memory for one purpose."""

    what: str
    nbytes: int
    details: str


def memory_needed(engine: Engine, data: Data, batch_sizes: Sequence[int]) -> list[Needed]:
    """Return the memory that a worker needs in a step, by purpose; on a mesh, that of one device. Local."""
    plan, world = engine.plan, engine.world
    one = engine.workers.some_present
    state = engine.states[one]
    local = [state[i] for i in plan.local_state]
    op_states = [a for values in engine.op_states[one] for a in values]
    place, mesh = engine.context.placements[one], world.local_mesh
    sent = bytes_per_execution(plan, engine.layouts, place)
    largest = max(batch_sizes[worker] for worker in world.workers)
    rows = largest if mesh is None or largest % mesh.granule else largest // mesh.granule
    kernels = engine.kernels
    is_cut = any(len(kernels.fixed_microbatches(size)) > 1 for size in batch_sizes)
    several = kernels.splittable and (kernels.resizable or is_cut)
    arriving = sum(bytes_on_device(place, n, engine.layouts[n]) for n, m in enumerate(plan.messages) if m.travels)
    alone = world.processes == 1 and len(world.devices) == 1
    row = sum(leaf.nbytes for leaf in jax.tree.leaves(data.example))
    compiled = [*engine.context.programs.values(), *kernels.compiled.all_of(0)]
    temporaries = temporary_bytes([kernel.run for kernel in compiled])
    found = [
        Needed("state", _bytes_of(state), _leaves(len(state))),
        Needed("initial values", _bytes_of(local), "of local leaves, for workers that join"),
        Needed("operator states", _bytes_of(op_states), "of monitors and other operators"),
        Needed("constants", _bytes_of(_constants(engine)), "that the driver closes over"),
        Needed(
            "parts of messages",
            sent * (1 + several),
            "gradients and other values that a microbatch sends"
            + "; twice, as a batch may run as several microbatches" * several,
        ),
        Needed("receive buffers", 0 if alone else arriving, "for reduced messages"),
        Needed(
            "temporaries",
            temporaries or 0,
            "not known before the first step" if temporaries is None else "of the largest compiled kernel",
        ),
        Needed("batches", _BATCHES * rows * row, f"{_BATCHES} of {rows} examples: one is fetched ahead"),
    ]
    if data.in_memory:
        found.append(Needed("data set", len(data) * row, "in memory, for all workers of the process"))
    return [needed for needed in found if needed.nbytes or needed.what in ("state", "temporaries")]


def _bytes_of(arrays: Iterable[jax.Array]) -> int:
    """Return the bytes of arrays on one of their devices."""
    return sum(a.nbytes // max(a.size, 1) * math.prod(a.sharding.shard_shape(a.shape)) for a in arrays)


def _constants(engine: Engine) -> Iterable[Any]:
    """Yield each constant once, even if several programs read it."""
    programs = [call for (*_, local_index), call in engine.context.programs.calls.items() if not local_index]
    kernels = [kernel.call for kernel in engine.kernels.compiled.all_of(0)]
    return {id(c): c for call in (*programs, *kernels) for c in call.consts.values()}.values()
