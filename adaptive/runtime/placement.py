"""Where the values of a worker's step are: on its device, or over its mesh.

Programs are compiled for the shardings of their arguments and results. On a mesh these are

    a leaf of the state that is on the mesh  its own sharding
    another leaf, an operator state, a part  that of the leaf with which it is combined element by element, as an
    of a message                             optimizer's moments are with their parameter
    a batch, and values of each example      split over the batch's axes
    anything else                            a copy on each device

A message's part is also cut over the axes over which it would be replicated, so that a worker sends each byte once.
All workers' messages are cut alike, whatever the sizes of their batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from adaptive.base.channel import PartSpec
from adaptive.base.errors import DriverError
from adaptive.base.local_mesh import LocalMesh
from adaptive.base.process.source_lines import at
from adaptive.base.values.jaxprs import Var
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.graph.trace import Atom, operands_of
from adaptive.operators.collectives import collective_p
from adaptive.operators.replication_claims import assert_scope_p

from .message import Layout
from .segment import Address, SegmentFunction

# Operations whose results are sharded as their operands of the same shape are.
_ELEMENTWISE = {"abs", "add", "add_any", "and", "clamp", "convert_element_type", "copy", "div", "eq", "erf", "exp"}
_ELEMENTWISE |= {"expm1", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min"}
_ELEMENTWISE |= {"mul", "ne", "neg", "not", "or", "pow", "rsqrt", "select_n", "sign", "sqrt", "square", "sub", "tanh"}
_ELEMENTWISE |= {"optimization_barrier", "sharding_constraint", "stop_gradient", collective_p.name, assert_scope_p.name}


class Placement:
    """Where the values of one worker are: here, on a device.

    Attributes:
      device: the device.
      target: what `jax.device_put` is given for values of which each device holds a copy.
    """

    def __init__(self, device: jax.Device):
        self.device, self.target = device, device
        self._sharding = SingleDeviceSharding(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)

    def sharding(self, address: Address, shape: Sequence[int]) -> Sharding:
        """Return the sharding of a value."""
        return self._sharding

    def arguments(self, call: SegmentFunction) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of a segment's arguments, with their shardings."""
        each = zip(call.arguments, call.shapes, strict=True)
        return [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.sharding(a, s.shape)) for a, s in each]

    def results(self, call: SegmentFunction) -> list[Sharding]:
        """Return the shardings of a segment's results."""
        return [self.sharding(address, shape) for address, shape in zip(call.results, call.result_shapes, strict=True)]

    def specs(self, number: int, layout: Layout) -> Sequence[PartSpec]:
        """Return the parts of a message, with their shardings over a mesh."""
        return layout.parts


class OnMesh(Placement):
    """A worker on a mesh of devices. Its shardings follow from a plan, those of other sizes being alike, and from the
    leaves of the initial state.

    Raises:
      DriverError: a message cannot be reduced in parts.
    """

    def __init__(self, mesh: LocalMesh, plan: Plan, layouts: Sequence[Layout], state: Sequence[Any]):
        self._mesh = mesh
        self.device, self.target = mesh.device, mesh.whole
        self._known: dict[Address, NamedSharding | None] = {}
        self._by_example: set[Address] = set()
        if plan.graph.pairings:
            raise _not_on_a_mesh(plan.graph.pairings[0].line)
        given = [mesh.of_leaf(leaf) for leaf in state]
        alike = _shardings(plan, given)
        for i, (var, sharding) in enumerate(zip(plan.graph.state_vars, given, strict=True)):
            self._known["state", i, 0] = sharding or alike(var)
        for k, op_state in enumerate(plan.op_states):
            for leaf, var in enumerate(op_state.values):
                self._known["op_state", k, leaf] = alike(var)
        for segment in (*plan.microbatches.values(), *plan.prologues.values()):
            for i, atom in enumerate(segment.outputs):
                self._known[segment.kind, segment.level, i] = known = alike(atom)
                if known is None and segment.kind == "microbatch" and atom.aval.shape[:1] == (plan.graph.examples,):
                    self._by_example.add((segment.kind, segment.level, i))
        for number, layout in enumerate(layouts):
            for j, sharding in enumerate(_parts(mesh, layout, alike)):
                self._known["part", number, j] = self._known["message", number, j] = sharding

    def sharding(self, address: Address, shape: Sequence[int]) -> Sharding:
        if address[0] == "batch" or address in self._by_example:
            return self._mesh.of_batch(shape[0])
        return self._known.get(address) or self._mesh.whole

    def specs(self, number: int, layout: Layout) -> Sequence[PartSpec]:
        shardings = [self.sharding(("part", number, j), p.shape) for j, p in enumerate(layout.parts)]
        return [part._replace(sharding=sharding) for part, sharding in zip(layout.parts, shardings, strict=True)]


def placements_of(world: World, plan: Plan, layouts: Sequence[Layout], state: Sequence[Any]) -> list[Placement]:
    """Return the placement of each worker of this process, by local index. Raises a DriverError: see `OnMesh`."""
    if world.local_mesh is None:
        return [Placement(device) for device in world.devices]
    return [OnMesh(world.local_mesh, plan, layouts, state)] * len(world.devices)


def _parts(
    mesh: LocalMesh, layout: Layout, alike: Callable[[Atom], NamedSharding | None]
) -> list[NamedSharding | None]:
    """Return the shardings of a message's parts; `None` for one of which each device holds a copy."""
    found: list[NamedSharding | None] = [None] * len(layout.parts)
    for c, entry in zip(layout.contributions, layout.entries, strict=True):
        part = layout.parts[entry.part]
        if not isinstance(part.op, str):
            raise _not_on_a_mesh(f"{c.how.name}{at(c.line)}")
        if part.shape == entry.shape == c.value.aval.shape and entry.offset == 0:  # a large leaf, by itself
            found[entry.part] = mesh.cut(alike(c.value) or mesh.whole, part.shape)
    return found


def _not_on_a_mesh(what: str) -> DriverError:
    return DriverError(
        f"{what} is not available where a worker is a mesh: it needs whole values on one device. Exchange gradients or "
        "parameters by  comm.all_reduce(x),  without wire=, or by a strategy of such means: sync.synchronous, "
        "sync.model_averaging, sync.local_steps or sync.diloco."
    )


def _shardings(plan: Plan, given: Sequence[NamedSharding | None]) -> Callable[[Atom], NamedSharding | None]:
    """Return a function that returns a variable's sharding, `None` if it is unknown. Variables of one shape that are
    combined element by element have the sharding of the first leaf of the state among them that is on the mesh.

    Args:
      given: of the leaves of the state.
    """
    graph, alike, found = plan.graph, defaultdict[Var, list[Var]](list), dict[Var, NamedSharding]()
    pairs: list[tuple[Atom, Atom]] = list(zip(graph.state_vars, graph.new_state, strict=True))
    for op_state in plan.op_states:
        pairs += zip(op_state.values, op_state.new, strict=True)
    for eqn in graph.eqns:
        if eqn.primitive.name in _ELEMENTWISE:
            operands, results = operands_of(eqn), eqn.outvars
            pairs += zip(results * len(operands) if len(results) == 1 else results, operands, strict=False)
    for one, other in pairs:
        if isinstance(one, Var) and isinstance(other, Var) and one.aval.shape == other.aval.shape != ():
            alike[one].append(other)
            alike[other].append(one)
    for leaf, sharding in zip(graph.state_vars, given, strict=True):
        stack = [] if sharding is None else [leaf]
        while sharding is not None and stack:
            var = stack.pop()
            if var not in found:
                found[var] = sharding
                stack += alike[var]
    return lambda atom: found.get(atom) if isinstance(atom, Var) else None
