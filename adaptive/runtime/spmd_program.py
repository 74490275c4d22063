"""A whole step as one XLA program over a mesh of the workers' devices: `jax.shard_map` with the collectives inside.

The program consists of the plan's segments and messages, in the order in which `host_step.py` runs them, so it
computes the same. Barriers between segments keep XLA from fusing across them, so on CPU devices the results are bitwise
equal.

    segments  prologue and microbatch, as on each worker by itself
    pack      the parts of each message
    reduce    over the mesh's axis (`WorkerMesh.reduce_within`)
    check     whether the reduced parts are finite, as an output
    final     on the reduced parts
    commit    `where(ok, new, old)`, so that the memory of the old state can be donated

Every leaf of the state is a "replicated" array over the mesh. So are local leaves, although each device holds the value
of its own worker: such an array is never read as a whole, and `shard_map` does not move data. Workers that are meshes
themselves would need a second axis, over which their leaves are sharded and this file does not reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive.base.jaxprs import asks_the_host, axes_of, has_effects, nested_equations
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.graph.plan import Plan, Segment
from adaptive.graph.trace import Atom
from adaptive.operators.sources import EXAMPLES, STEP, source_p

from .compile import compile_over
from .message import lay_out_all
from .microbatch_segments import consts_of
from .segment import FLOATS, INTS, Address, final_results, segment_function

if TYPE_CHECKING:
    from .step_plan import StepContext


class Given(NamedTuple):
    """The program's inputs besides the state that it replaces.

    Attributes:
      state: the leaves that it does not change.
      floats, ints: the vectors of sources (`Feed`) of all workers; a row for each.
      step: the number of completed steps; the program increments it.
      consts: arrays of the driver's closure.
      batch: leaves of the global batch, in the order of workers.
    """

    state: list[Any]
    floats: Any
    ints: Any
    step: Any
    consts: list[dict[Address, Any]]
    batch: list[Any]


class Results(NamedTuple):
    """The program's results.

    Attributes:
      state, op_states: the new state and operator states.
      step: the step number for the next step.
      ok: whether the step is committed. `None` without NaN checks.
      shown: hook values and metrics.
    """

    state: list[jax.Array]
    op_states: list[jax.Array]
    step: jax.Array
    ok: jax.Array | None
    shown: list[jax.Array]


def why_not(plan: Plan, mesh: WorkerMesh) -> str:
    """Return why steps of a plan cannot run as programs over the mesh; "" if they can."""
    if any(message.gate is not None for message in plan.messages):
        return "some messages are sent in some steps only"
    if plan.graph.pairings:
        return "workers read each other's published state"
    if not all(mesh.reduces(op) for message in plan.messages for op in [c.how.op for c in message]):
        return "a reduction is computed from numbers of the host"
    segments = [*plan.prologues.values(), *plan.microbatches.values(), plan.final]
    if any(_needs_its_own_program(eqn) for segment in segments for eqn in segment.eqns):
        return "the driver has callbacks to Python, or is itself sharded over devices"
    return ""


def _needs_its_own_program(eqn: JaxprEqn) -> bool:
    return asks_the_host(eqn) or any(has_effects(e) or axes_of(e) for e in (eqn, *nested_equations(eqn)))


class SPMDProgram:
    """One step of equal batches, compiled for a mesh.

    Args:
      ctx: the parts that the engine's steps share.
      size: examples of each worker.

    Attributes:
      size: examples of each worker.
      consts: arrays that the program's segments close over, on the mesh.
      run: `run(changed state, op_states, Given) -> Results`; the memory of the first two is donated.
    """

    def __init__(self, ctx: StepContext, mesh: WorkerMesh, size: int):
        self._ctx, self._steps, self._mesh, self.size = ctx, ctx.step_plan, mesh, size
        self._sized = ctx.step_plan.plans(size)  # for microbatch segments; others come from the reference plan
        self._everywhere, self._split = NamedSharding(mesh.mesh, P()), NamedSharding(mesh.mesh, P(mesh.axis))
        self._segments = [
            *self._steps.plan.prologues.values(),
            *self._sized.microbatches.values(),
            self._steps.plan.final,
        ]
        self.consts = [self._consts_of(segment) for segment in self._segments]
        state, op_states, given = self._shapes()
        specs = Given(P(), P(mesh.axis), P(mesh.axis), P(), P(), P(mesh.axis))  # type: ignore[arg-type]
        over_mesh = jax.shard_map(
            self._step, mesh=mesh.mesh, in_specs=(P(), P(), specs), out_specs=P(), check_vma=False
        )
        name = f"{self._steps.label}step_{size}"
        devices = tuple(mesh.mesh.devices.flat)
        self.run = compile_over(over_mesh, (state, op_states, given), devices, name=name, donate=(0, 1))

    def _consts_of(self, segment: Segment) -> dict[Address, jax.Array]:
        ctx, plan = self._ctx, self._sized if segment.kind == "microbatch" else self._steps.plan
        found: dict[Address, jax.Array] = {}
        for address, value in consts_of(plan, segment).items():
            copies = [ctx.kernels.compiled.constants.on(device, value) for device in ctx.world.devices]
            found[address] = jax.make_array_from_single_device_arrays(copies[0].shape, self._everywhere, copies)
        return found

    def _shapes(self) -> tuple[list[Any], list[Any], Given]:
        """Return the shapes of the program's arguments, of all workers together."""
        plan, feed, n = self._steps.plan, self._steps.feed, self._mesh.mesh.size

        def everywhere(aval: Any) -> Any:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=self._everywhere)

        def split(shape: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct((n * shape[0], *shape[1:]), dtype, sharding=self._split)

        variables, changed = plan.graph.state_vars, set(plan.changed_state)
        given = Given(
            [everywhere(v.aval) for i, v in enumerate(variables) if i not in changed],
            split((1, 1 + len(feed.floats)), np.dtype(np.float32)),
            split((1, len(feed.ints) + feed.capacity), np.dtype(np.int32)),
            jax.ShapeDtypeStruct((), np.dtype(np.int32), sharding=self._everywhere),
            jax.tree.map(everywhere, self.consts),
            [split(v.aval.shape, v.aval.dtype) for v in self._sized.graph.batch_vars],
        )
        state = [everywhere(variables[i].aval) for i in plan.changed_state]
        return state, [everywhere(v.aval) for op_state in plan.op_states for v in op_state.values], given

    # --- traced -------------------------------------------------------------------------------------------------------

    def _step(self, changed: list[Any], op_states: list[Any], given: Given) -> Results:
        """Compute one worker's step."""
        run = _OneWorker(self, changed, op_states, given)
        for level in range(self._steps.plan.levels + 1):
            run.segments(level)
            if level < self._steps.plan.levels:
                run.exchange(level)
        return run.commit()


class _OneWorker:
    """One worker's step while it is traced; compare `host_step.HostStep`."""

    def __init__(self, program: SPMDProgram, changed: list[Any], op_states: list[Any], given: Given):
        ctx, steps, plan = program._ctx, program._steps, program._steps.plan
        self._ctx, self._steps, self._plan, self._mesh = ctx, steps, plan, program._mesh
        self._sized, self._size, self._given = program._sized, program.size, given
        self._old = [*changed, *op_states]
        kept = [i for i in range(len(plan.graph.state_vars)) if i not in plan.changed_state]
        self._values: dict[Address, Any] = dict(zip(final_results(plan), self._old, strict=False))
        self._values.update(zip([("state", i, 0) for i in kept], given.state, strict=True))
        self._values.update({("batch", i, 0): leaf for i, leaf in enumerate(given.batch)})
        self._values.update({FLOATS: given.floats[0], INTS: self._with_step()})
        self._consts = {(s.kind, s.level): c for s, c in zip(program._segments, given.consts, strict=True)}
        status = sum(layout.status for layout in steps.layouts)
        self._layouts = lay_out_all(self._sized.messages, capacity=plan.graph.capacity, status=status)
        self._ok: list[Any] = []

    def _with_step(self) -> Any:
        """Return the vector of integers with the step number, which is counted on the devices."""
        ints = self._given.ints[0]
        for place, source in enumerate(self._steps.feed.ints):
            if source.name == STEP.name:
                ints = ints.at[place].set(self._given.step)
        return ints

    def _run(self, segment: Segment, taken_as: Callable[[Var, Any], Any] = lambda var, value: value) -> list[Any]:
        """Compute a segment, keep its results, and return them."""
        sized = segment.kind == "microbatch"
        plan, layouts = (self._sized, self._layouts) if sized else (self._plan, self._steps.layouts)
        even = self._as_one(plan)
        call = segment_function(plan, segment, self._steps.feed, layouts, taken_as=taken_as, as_one=even)
        values = {**self._values, **self._consts[segment.kind, segment.level]}
        results = call.run(*(values[address] for address in call.arguments))
        if segment.kind != "final":
            results = jax.lax.optimization_barrier(results)
            self._values.update(zip(call.results, results, strict=True))
        return results

    def _as_one(self, plan: Plan) -> frozenset[Var]:
        """Return the weights in place of which 1 is sent, because all batches have the same size.

        That saves the multiplication. The quotients are bitwise equal if the size is a power of two; for other sizes it
        is done only in programs whose last bits may depend on the machine's speed.
        """
        size = self._size
        if size & (size - 1) and self._ctx.kernels.deterministic:
            return frozenset()
        sources = (eqn for eqn in plan.graph.eqns if eqn.primitive is source_p)
        return frozenset(eqn.outvars[0] for eqn in sources if eqn.params["source"].name == EXAMPLES.name)

    def segments(self, level: int) -> None:
        """Compute the segments before the messages of a level."""
        for segment in (self._plan.prologues.get(level), self._sized.microbatches.get(level)):
            if segment is not None:
                self._run(segment)

    def exchange(self, level: int) -> None:
        """Reduce the messages of a level, and check that they are finite."""
        steps = self._steps
        for number in self._plan.sent_at(level):
            layout = steps.layouts[number]
            arrived = [self._values["part", number, i] for i in range(len(layout.parts))]
            if self._plan.messages[number].travels:
                arrived = self._mesh.reduce_within(arrived, layout.ops, self._given.step + 1)
                arrived = jax.lax.optimization_barrier(arrived)
                if steps.finite_checks:
                    even = self._as_one(self._plan)
                    known = zip(layout.contributions, layout.weights, strict=True)
                    whole = {weight.offset for c, weight in known if weight is not None and c.weight in even}
                    self._ok.append(steps.finite_checks[number].all_finite(arrived, whole))
            self._values.update({("message", number, i): part for i, part in enumerate(arrived)})

    def commit(self) -> Results:
        """Run the final segment, whose results replace the state if all messages are finite."""
        plan, checked, changed = self._plan, bool(self._steps.finite_checks), len(self._plan.changed_state)
        chosen = _Chosen(self._ok)
        if checked:
            chosen.replace(plan.final_outputs[: len(self._old)], self._old)
        out = self._run(plan.final, chosen)
        new, shown = out[: len(self._old)], out[len(self._old) :]
        if checked:
            new = chosen.all_of(new, self._old)
        return Results(new[:changed], new[changed:], self._given.step + 1, chosen.ok if checked else None, shown)


class _Chosen:
    """Selects the new state if all messages are finite, otherwise the old one.

    Selects each leaf as soon as it is computed, followed by a barrier. Otherwise, if one leaf is computed from another
    (parameters from an optimizer's averages), XLA would compute the other leaf twice, and copy its old value, whose
    memory is overwritten. In a step that is not committed, later leaves are computed from old ones; they are discarded.

    Args:
      ok: for each message, whether it is finite.
    """

    def __init__(self, ok: Sequence[Any]):
        self.ok = jnp.stack(ok).all() if ok else jnp.asarray(True)
        self._old: dict[Var, Any] = {}
        self._done: list[Atom] = []
        self._new: list[Atom] = []

    def replace(self, new: Sequence[Atom], old: Sequence[Any]) -> None:
        """Select each of `new` when it is computed."""
        self._new = list(new)
        self._old = {v: x for v, x in zip(new, old, strict=True) if isinstance(v, Var) and self._new.count(v) == 1}

    def __call__(self, var: Var, value: Any) -> Any:
        """Return the value to use for a computed variable: the selected one, if it is part of the state."""
        if var not in self._old:
            return value
        self._done.append(var)
        return self._of(value, self._old[var])

    def all_of(self, results: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        """Return all selected results, including those that the final segment only passes through."""
        done = {id(v) for v in self._done}
        return [
            x if id(v) in done else self._of(x, before) for v, x, before in zip(self._new, results, old, strict=True)
        ]

    def _of(self, new: Any, old: Any) -> Any:
        return jax.lax.optimization_barrier(jnp.where(self.ok, new, old))
