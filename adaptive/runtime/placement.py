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

from collections.abc import Sequence
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

from .message import LARGE_BYTES, Layout
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
      notes: for the first report.
    """

    notes: Sequence[str] = ()

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
        self.notes: list[str] = []
        self._known: dict[Address, NamedSharding] = {}
        self._by_example: set[Address] = set()
        if plan.graph.pairings:
            raise _not_on_a_mesh(plan.graph.pairings[0].line)
        same = _Classes(plan)
        given = [mesh.of_leaf(leaf) for leaf in state]
        for var, sharding in zip(plan.graph.state_vars, given, strict=True):
            if sharding is not None:
                same.shard(var, sharding)
        for i, (var, sharding) in enumerate(zip(plan.graph.state_vars, given, strict=True)):
            self._know(("state", i, 0), sharding or same.sharding(var))
            self._note_copies(("state", i, 0), state[i], plan.graph.state_names[i])
        for k, op_state in enumerate(plan.op_states):
            for leaf, var in enumerate(op_state.values):
                self._know(("op_state", k, leaf), same.sharding(var))
        for segment in (*plan.microbatches.values(), *plan.prologues.values()):
            for i, atom in enumerate(segment.outputs):
                address = segment.kind, segment.level, i
                self._know(address, same.sharding(atom))
                if segment.kind == "microbatch" and atom.aval.shape[:1] == (plan.graph.examples,):
                    self._by_example.add(address)
        for number, layout in enumerate(layouts):
            for j, sharding in enumerate(_parts(mesh, layout, same)):
                self._know(("part", number, j), sharding)
                self._know(("message", number, j), sharding)

    def _note_copies(self, address: Address, leaf: Any, name: str) -> None:
        """Add a note if each device gets a copy of a large leaf, and the user has not said so."""
        if address not in self._known and leaf.nbytes >= LARGE_BYTES and self._mesh.mesh.size > 1:
            self.notes.append(
                f"{name} ({leaf.nbytes / 1e6:.1f} MB) is not on the mesh: each device holds a copy. To shard it, make "
                "it with a sharding:  jax.jit(init, out_shardings=shardings)().  To copy it on purpose:  "
                "jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))"
            )

    def _know(self, address: Address, sharding: NamedSharding | None) -> None:
        if sharding is not None:
            self._known[address] = sharding

    def sharding(self, address: Address, shape: Sequence[int]) -> Sharding:
        if address[0] == "batch" or (address in self._by_example and address not in self._known):
            return self._mesh.of_batch(shape[0])
        return self._known.get(address, self._mesh.whole)

    def specs(self, number: int, layout: Layout) -> Sequence[PartSpec]:
        shardings = [self.sharding(("part", number, j), p.shape) for j, p in enumerate(layout.parts)]
        return [part._replace(sharding=sharding) for part, sharding in zip(layout.parts, shardings, strict=True)]


def placements_of(world: World, plan: Plan, layouts: Sequence[Layout], state: Sequence[Any]) -> list[Placement]:
    """Return the placement of each worker of this process, by local index. Raises a DriverError: see `OnMesh`."""
    if world.local_mesh is None:
        return [Placement(device) for device in world.devices]
    return [OnMesh(world.local_mesh, plan, layouts, state)] * len(world.devices)


def _parts(mesh: LocalMesh, layout: Layout, same: _Classes) -> list[NamedSharding | None]:
    """Return the shardings of a message's parts; `None` for one of which each device holds a copy."""
    found: list[NamedSharding | None] = [None] * len(layout.parts)
    for c, entry in zip(layout.contributions, layout.entries, strict=True):
        part = layout.parts[entry.part]
        if not isinstance(part.op, str):
            raise _not_on_a_mesh(f"{c.how.name}{at(c.line)}")
        if part.shape == entry.shape == c.value.aval.shape and entry.offset == 0:  # a large leaf, by itself
            found[entry.part] = mesh.cut(same.sharding(c.value) or mesh.whole, part.shape)
    return found


def _not_on_a_mesh(what: str) -> DriverError:
    return DriverError(
        f"{what} is not available where a worker is a mesh: it needs whole values on one device. Exchange gradients or "
        "parameters by  comm.all_reduce(x),  without wire=, or by a strategy of such means: sync.synchronous, "
        "sync.model_averaging, sync.local_steps or sync.diloco."
    )


class _Classes:
    """Classes of variables that are sharded alike: those of one shape that are combined element by element."""

    def __init__(self, plan: Plan):
        graph = plan.graph
        self._parent: dict[Var, Var] = {}
        self._sharding: dict[Var, NamedSharding] = {}
        for old, new in zip(graph.state_vars, graph.new_state, strict=True):
            self._join(old, new)
        for op_state in plan.op_states:
            for old, new in zip(op_state.values, op_state.new, strict=True):
                self._join(old, new)
        for eqn in graph.eqns:
            if eqn.primitive.name in _ELEMENTWISE:
                operands, results = operands_of(eqn), eqn.outvars
                for a in operands if len(results) == 1 else ():
                    self._join(results[0], a)
                for result, a in zip(results, operands, strict=False):
                    self._join(result, a)

    def _root(self, var: Var) -> Var:
        while (parent := self._parent.get(var, var)) is not var:
            self._parent[var] = self._parent.get(parent, parent)
            var = parent
        return var

    def _join(self, one: Atom, other: Atom) -> None:
        if isinstance(one, Var) and isinstance(other, Var) and one.aval.shape == other.aval.shape and one.aval.shape:
            self._parent[self._root(one)] = self._root(other)

    def shard(self, var: Var, sharding: NamedSharding) -> None:
        """Set the sharding of a variable's class, unless it has one."""
        self._sharding.setdefault(self._root(var), sharding)

    def sharding(self, atom: Atom) -> NamedSharding | None:
        """Return the sharding of a variable's class; `None` if it is unknown."""
        return self._sharding.get(self._root(atom)) if isinstance(atom, Var) else None
