"""The fused step: a whole step as one XLA program, `jax.shard_map` with the collectives inside.

It runs over the mesh of the workers' devices, or of a lone worker's device. The program consists of the plan's segments
and messages, in the order in which the host step runs them (`host_step.py`). Barriers between segments keep XLA from
fusing across them, so on CPU devices the results are bitwise equal. The state becomes `where(ok, new, old)`, so that
the memory of the old one can be donated. A step that is not finite changes nothing, and neither do those after it,
which the host may have dispatched already: the number of the first such step is passed from step to step.

Every leaf of the state is a "replicated" array over the mesh. So are local leaves, although each device holds the value
of its own worker: such an array is never read as a whole, and `shard_map` does not move data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from adaptive.base.values.jaxprs import JaxprEqn, Var, asks_the_host, axes_of, has_effects, nested_equations
from adaptive.base.worker_mesh import WorkerMesh
from adaptive.graph.plan import Plan
from adaptive.graph.trace import Atom
from adaptive.operators.sources import EXAMPLES, STEP, source_p

from .kernels.compile import compile_segment
from .kernels.microbatches import Microbatches
from .mesh_arrays import MeshArrays
from .message import accumulate
from .segment import FLOATS, INTS, START, Address, SegmentFunction, microbatch_functions, segment_function

if TYPE_CHECKING:
    from .step_context import StepContext

NO_FAULT = -1  # in place of the number of a step


class Given(NamedTuple):
    """The program's inputs besides the state that it replaces."""

    state: list[Any]  # the leaves that it does not change
    floats: Any  # and ints, the vectors of sources (`Feed`) of all workers; a row for each
    ints: Any
    step: Any  # the number of completed steps; the program increments it
    fault: Any  # the number of the first step that was not finite; `NO_FAULT` if none was
    consts: list[dict[Address, Any]]  # arrays of the driver's closure, for each segment
    batch: list[Any]  # leaves of the global batch, in the order of workers


class Results(NamedTuple):
    """The program's results."""

    replaced: list[jax.Array]  # the new state and operator states
    step: jax.Array  # the step number for the next step
    fault: jax.Array  # as in `Given`, this step included
    shown: list[jax.Array]  # hook values and metrics


def can_be_fused(plan: Plan, mesh: WorkerMesh) -> bool:
    """Return whether steps of a plan can run as programs over the mesh: all messages are sent in each step and reduced
    without numbers of the host, no worker reads another's published state, and the driver neither calls Python nor is
    itself sharded over devices.
    """
    contributions = [(message, c) for message in plan.messages for c in message]
    segments = [*plan.prologues.values(), *plan.microbatches.values(), plan.final]
    return (
        not plan.graph.pairings
        and all(message.gate is None and mesh.reduces(c.how.op) for message, c in contributions)
        and not any(_needs_its_own_program(eqn) for segment in segments for eqn in segment.eqns)
    )


def _needs_its_own_program(eqn: JaxprEqn) -> bool:
    return asks_the_host(eqn) or any(has_effects(e) or axes_of(e) for e in (eqn, *nested_equations(eqn)))


class FusedProgram:
    """One step of equal batches, compiled for a mesh.

    Attributes:
      calls: the segments before messages, by kind, level and size; 0 for a prologue.
      consts: arrays that these close over, on the mesh; those of the final segment last.
      run: `run(state and operator states, Given) -> Results`; the memory of the first is donated.
    """

    def __init__(self, ctx: StepContext, arrays: MeshArrays, microbatches: Microbatches):
        self.steps, self.mesh, self.microbatches = ctx, arrays.mesh, microbatches
        self.state, self.n_replaced = list(ctx.workers.places), ctx.workers.replaced
        plan, feed, programs = self.steps.plan, self.steps.feed, ctx.programs
        # For microbatch segments; others come from the reference plan.
        sized = {size: self.steps.plans(size) for size in dict.fromkeys(microbatches)}
        self.calls: dict[tuple[str, int, int], SegmentFunction] = {
            ("prologue", level, 0): programs.calls["prologue", level, 0] for level in plan.prologues
        }
        status = sum(layout.status for layout in self.steps.layouts)
        for size, of_size in sized.items():
            as_one = frozenset[Var]() if len(sized) > 1 else _as_one(of_size, size, ctx.kernels.deterministic)
            calls = microbatch_functions(of_size, feed, status, as_one=as_one)
            self.calls.update({("microbatch", level, size): call for level, call in calls.items()})
        on, devices = ctx.kernels.compiled.constants.on, ctx.world.devices
        self.consts = [
            {address: arrays.joined([on(device, x) for device in devices]) for address, x in call.consts.items()}
            for call in (*self.calls.values(), programs.calls["final", 0, 0])
        ]
        batch = sized[microbatches[0]].graph.batch_vars
        shapes, donated = self._shapes(arrays, [v.aval for v in batch]), P()
        given = Given(P(), P(self.mesh.axis), P(self.mesh.axis), P(), P(), P(), P(self.mesh.axis))  # type: ignore[arg-type]
        over_mesh = jax.shard_map(
            self._step, mesh=self.mesh.mesh, in_specs=(donated, given), out_specs=P(), check_vma=False
        )
        name = f"{self.steps.label}step_{'_'.join(map(str, microbatches))}"
        self.run = compile_segment(over_mesh, shapes, self.mesh.mesh.devices.flat[0], name=name, donate=1)

    def _shapes(self, arrays: MeshArrays, batch: Sequence[Any]) -> tuple[list[Any], Given]:
        """Return the shapes of the program's arguments, of all workers together."""
        plan, feed, n = self.steps.plan, self.steps.feed, self.mesh.mesh.size

        def everywhere(aval: Any) -> Any:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=arrays.everywhere)

        def split(rows: int, shape: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct((n * rows, *shape), dtype, sharding=arrays.split)

        variables = {("state", i, 0): v for i, v in enumerate(plan.graph.state_vars)}
        variables |= {("op_state", k, i): v for k, s in enumerate(plan.op_states) for i, v in enumerate(s.values)}
        state = [everywhere(variables[address].aval) for address in self.state]
        number = everywhere(jax.ShapeDtypeStruct((), np.dtype(np.int32)))
        given = Given(
            state[self.n_replaced :],
            split(1, (len(feed.floats),), np.dtype(np.float32)),
            split(1, (len(feed.ints) + feed.capacity,), np.dtype(np.int32)),
            number,
            number,
            jax.tree.map(everywhere, self.consts),
            [split(sum(self.microbatches), aval.shape[1:], aval.dtype) for aval in batch],
        )
        return state[: self.n_replaced], given

    def _step(self, replaced: list[Any], given: Given) -> Results:
        """Compute one worker's step; traced."""
        run = _OneWorker(self, replaced, given)
        for level in range(self.steps.plan.levels + 1):
            run.compute(level)
            if level < self.steps.plan.levels:
                run.exchange(level)
        return run.commit()


def _as_one(plan: Plan, size: int, deterministic: bool) -> frozenset[Var]:
    """Return the weights in place of which 1 is sent, where all microbatches have this size; saves the multiplication.
    The quotients have other last bits if the size is no power of two.
    """
    if size & (size - 1) and deterministic:
        return frozenset()
    sources = (eqn for eqn in plan.graph.eqns if eqn.primitive is source_p)
    return frozenset(eqn.outvars[0] for eqn in sources if eqn.params["source"].name == EXAMPLES.name)


class _OneWorker:
    """One worker's step while it is traced; compare `host_step.HostStep`."""

    def __init__(self, program: FusedProgram, replaced: list[Any], given: Given):
        self._program, self._steps, self._plan = program, program.steps, program.steps.plan
        self._given, self._old = given, replaced
        ints = given.ints[0]
        for place, source in enumerate(self._steps.feed.ints):
            if source.name == STEP.name:
                ints = ints.at[place].set(given.step)
        self._values: dict[Address, Any] = dict(zip(program.state, [*replaced, *given.state], strict=True))
        self._values.update({FLOATS: given.floats[0], INTS: ints})
        self._own, start = list[dict[Address, Any]](), 0  # the values of each microbatch
        for size in program.microbatches:
            rows = {("batch", i, 0): leaf[start : start + size] for i, leaf in enumerate(given.batch)}
            self._own.append({START: np.int32(start), **rows})
            start += size
        self._consts = dict(zip(program.calls, given.consts, strict=False))
        self._ok: list[Any] = [given.fault < 0]

    def compute(self, level: int) -> None:
        """Compute the segments before the messages of a level."""
        if level in self._plan.prologues:
            self._values.update(self._run(("prologue", level, 0), {}))
        if level not in self._plan.microbatches:
            return
        parts: list[Any] = []
        ops = [part.op for number in self._plan.sent_at(level) for part in self._steps.layouts[number].parts]
        for n, (size, own) in enumerate(zip(self._program.microbatches, self._own, strict=True)):
            results = self._run(("microbatch", level, size), own)
            addresses = [address for address in results if address[0] == "part"]
            new = [results.pop(address) for address in addresses]
            (own if n else self._values).update(results)
            parts = jax.lax.optimization_barrier(accumulate(ops, parts, new)) if n else new
        self._values.update(zip(addresses, parts, strict=True))

    def _run(self, which: tuple[str, int, int], own: dict[Address, Any]) -> dict[Address, Any]:
        """Return the results of a segment."""
        call, values = self._program.calls[which], {**self._values, **own, **self._consts[which]}
        results = jax.lax.optimization_barrier(call.run(*(values[address] for address in call.arguments)))
        return dict(zip(call.results, results, strict=True))

    def exchange(self, level: int) -> None:
        """Reduce the messages of a level, and check that they are finite."""
        steps = self._steps
        for number in self._plan.sent_at(level):
            layout = steps.layouts[number]
            arrived = [self._values["part", number, i] for i in range(len(layout.parts))]
            if self._plan.messages[number].travels:
                arrived = self._program.mesh.reduce_within(arrived, layout.ops, self._given.step + 1)
                arrived = jax.lax.optimization_barrier(arrived)
                if steps.finite_checks:
                    self._ok.append(steps.finite_checks[number].all_finite(arrived))
            self._values.update({("message", number, i): part for i, part in enumerate(arrived)})

    def commit(self) -> Results:
        """Run the final segment, whose results replace the state if all messages are finite."""
        plan, given, n = self._plan, self._given, len(self._old)
        ok, outputs, done = jnp.stack(self._ok).all(), plan.final_outputs[:n], set[Atom]()
        # A step whose values are not checked is always committed.
        old = {v: x for v, x in zip(outputs, self._old, strict=True) if isinstance(v, Var) and outputs.count(v) == 1}
        old = old if self._steps.finite_checks else {}

        def chosen(new: Any, before: Any) -> Any:
            return jax.lax.optimization_barrier(jnp.where(ok, new, before))

        # Each leaf is selected as soon as it is computed, followed by a barrier. Otherwise, if one leaf is computed
        # from another (parameters from an optimizer's averages), XLA would compute the other leaf twice, and copy its
        # old value, whose memory is overwritten. In a step that is not committed, later leaves are computed from old
        # ones; they are discarded.
        def taken_as(var: Var, value: Any) -> Any:
            if var not in old:
                return value
            done.add(var)
            return chosen(value, old[var])

        call = segment_function(plan, plan.final, self._steps.feed, self._steps.layouts, taken_as=taken_as)
        values = {**self._values, **given.consts[-1]}
        out = call.run(*(values[address] for address in call.arguments))
        new = out[:n]
        if self._steps.finite_checks:  # also results that the final segment only passes through
            each = zip(outputs, new, self._old, strict=True)
            new = [x if isinstance(v, Var) and v in done else chosen(x, before) for v, x, before in each]
        fault = jnp.where(ok | (given.fault >= 0), given.fault, given.step)
        return Results(new, given.step + 1, fault, out[n:])
