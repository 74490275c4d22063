"""From a driver program to one flat dataflow graph.

JAX traces the driver. Nested `jax.jit`s are inlined, so that collectives of helper functions are in the same list of
equations. A collective inside `scan`, `cond` or `while` is refused: values would decide whether and how often it runs,
and a worker could wait for a message that another never sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import AdaptiveError, CollectiveError, DriverError
from adaptive.base.process.source_lines import at, line_of, line_search_of
from adaptive.base.values.arrays import NotAnArrayError, check_not_sharded
from adaptive.base.values.jaxprs import (
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Var,
    axes_of,
    called,
    has_references,
    holder,
    is_checkpoint,
    most_devices,
    nested,
    nested_equations,
)
from adaptive.base.values.tree_paths import leaf_names
from adaptive.operators.axis import (
    AXES,
    WORKERS,
    Sum,
    as_collective,
    before_spread,
    is_over_workers,
    sizes_of,
    spread_size,
    without_divisions,
)
from adaptive.operators.batch_key import check_rows
from adaptive.operators.collectives import collective_p, operands
from adaptive.operators.context import DriverTrace, Minibatches, trace_as
from adaptive.operators.hooks import hook_p
from adaptive.operators.operator_state import state_read_p, state_write_p
from adaptive.operators.peer_read import Pairing, PeerMailboxes, numbered, read_peer_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import SEED, STEP, WORKER, Source, read, source_p

from .driver_errors import explained, kept, name_of

Atom: TypeAlias = Var | Literal
OPERATORS = {
    collective_p: "collective",
    source_p: "source",
    state_read_p: "operator state",
    state_write_p: "operator state",
    hook_p: "hook",
    assert_scope_p: "assertion",
}
_RESULTLESS = (hook_p, state_write_p)
_NO_MESSAGE = {primitive for primitive, kind in OPERATORS.items() if kind != "collective"}


@dataclass(frozen=True)
class Graph:
    """A driver, traced for microbatches of `examples` examples.

    Attributes:
      invars: state leaves, then batch leaves.
      outvars: new state leaves, then metric leaves.
      consts: values of arrays that the driver closes over, by variable.
      minibatches: for each `ad.minibatches` of the driver, how it cuts the batch.
      pairings: the driver's calls that publish vectors and read those of other workers.
      backward: results of collectives in the backward pass of a derivative, such as those of batch normalization.
    """

    name: str
    examples: int
    capacity: int
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...]
    consts: dict[Var, Any]
    state_names: tuple[str, ...]
    batch_names: tuple[str, ...]
    metric_names: tuple[str, ...]
    metrics_tree: jax.tree_util.PyTreeDef
    minibatches: tuple[Minibatches, ...] = ()
    pairings: tuple[Pairing, ...] = ()
    backward: frozenset[Var] = frozenset()

    @cached_property
    def producer(self) -> dict[Var, JaxprEqn]:
        """The equation that computes each variable; inputs have none."""
        return {var: eqn for eqn in self.eqns for var in eqn.outvars if not isinstance(var, DropVar)}

    @cached_property
    def from_batch(self) -> set[Var]:
        """The values that are computed from examples without a collective between."""
        found = set(self.batch_vars)
        for eqn in self.eqns:
            if eqn.primitive is not collective_p and any(isinstance(a, Var) and a in found for a in eqn.invars):
                found.update(eqn.outvars)
        return found

    def upstream(
        self,
        atoms: Iterable[Atom],
        until: Callable[[Var], bool],
        operands: Callable[[Var], Iterable[Atom]] | None = None,
    ) -> Iterator[Var]:
        """Yield the variables that values are computed from, each once, and those of `atoms` themselves.

        Args:
          until: whether to yield a variable, but not what it is computed from. Called before it is yielded.
          operands: returns what a variable is computed from; by default the operands that its equation needs.
        """
        stack, seen = [a for a in atoms if isinstance(a, Var)], set[Var]()
        while stack:
            var = stack.pop()
            if var in seen:
                continue
            seen.add(var)
            if not until(var) and var in self.producer:
                found = operands_of(self.producer[var]) if operands is None else operands(var)
                stack += [a for a in found if isinstance(a, Var)]
            yield var

    @property
    def multiple(self) -> int:
        """The number of which local batch sizes must be multiples."""
        return lcm(*(how.multiple for how in self.minibatches))

    @property
    def state_vars(self) -> tuple[Var, ...]:
        return self.invars[: len(self.state_names)]

    @property
    def batch_vars(self) -> tuple[Var, ...]:
        return self.invars[len(self.state_names) :]

    @property
    def new_state(self) -> tuple[Atom, ...]:
        return self.outvars[: len(self.state_names)]

    @property
    def metrics(self) -> tuple[Atom, ...]:
        return self.outvars[len(self.state_names) :]

    @property
    def metric_labels(self) -> list[str]:
        """Names of the metrics in messages; a driver that returns a bare value has one metric without a path."""
        return [f"metric {name}" if name else "the metric" for name in self.metric_names]


def trace(
    driver: Callable,
    state: Any,
    batch: Any,
    *,
    capacity: int,
    mailboxes: PeerMailboxes | None = None,
    on_mesh: bool = False,
) -> Graph:
    """Trace `driver(state, batch) -> (state, metrics)`.

    Args:
      state: pytree of arrays or shapes.
      batch: pytree of arrays or shapes, all with one leading axis: the examples of a microbatch.
      capacity: the number of worker slots; shapes of gathered values depend on it.
      mailboxes: the program's mailboxes, on which the driver may publish.
      on_mesh: whether the worker computes on a mesh, so that the driver may name shardings.

    Raises:
      DriverError: the driver does not return `(state, metrics)`, or changes the state's structure, shapes or dtypes,
        or closes over an array that is sharded over devices.
      CollectiveError: an operator is misplaced.
    """
    examples = jax.tree.leaves(batch)[0].shape[0]
    name = name_of(driver)
    tracing, closed, shapes = _traced(driver, state, batch, capacity, mailboxes or PeerMailboxes())
    if not (isinstance(shapes, tuple) and len(shapes) == 2):
        kind = f"tuple of {len(shapes)}" if isinstance(shapes, tuple) else type(shapes).__name__
        raise DriverError(f"driver {name!r} must return (state, metrics), a pair; it returned a {kind}.")
    new_state, metrics = shapes
    _check_state(name, state, new_state)
    flat = _Flattener(name, on_mesh=on_mesh)
    *invars, numbers = [Var(v.aval) for v in closed.jaxpr.invars]
    if any(_pairings(closed.jaxpr.eqns)):
        (numbers,) = flat.inline(jax.make_jaxpr(lambda: jnp.stack([read(WORKER), read(STEP), read(SEED)]))(), ())
    outvars = [flat.as_variable(atom) for atom in flat.inline(closed, [*invars, numbers])]
    _check_none_left_out(tracing.must_stay, flat.eqns)
    eqns, outvars = without_divisions(flat.eqns, flat.sums, outvars) if flat.sums else (flat.eqns, outvars)
    check_rows(eqns, examples)
    return Graph(
        name=name,
        examples=examples,
        capacity=capacity,
        invars=tuple(invars),
        outvars=tuple(outvars),
        eqns=tuple(eqns),
        consts=flat.consts,
        state_names=leaf_names(state, "state"),
        batch_names=leaf_names(batch, "batch"),
        metric_names=leaf_names(metrics, ""),
        metrics_tree=jax.tree.structure(metrics),
        minibatches=tuple(dict.fromkeys(tracing.minibatches)),
        pairings=numbered(_pairings(eqns)),
        backward=frozenset(flat.backward),
    )


def _traced(
    driver: Callable, state: Any, batch: Any, capacity: int, mailboxes: PeerMailboxes
) -> tuple[DriverTrace, ClosedJaxpr, tuple[Any, ...]]:
    """Return the trace's records, the jaxpr of `driver(state, batch)` with `DriverTrace.numbers` as a further input,
    and the shapes of its results.
    """
    with trace_as(capacity, jax.tree.leaves(batch)[0].shape[0], mailboxes) as tracing:

        def with_numbers(state: Any, batch: Any, numbers: Any) -> Any:
            tracing.numbers = numbers
            try:
                return driver(state, batch)
            finally:
                tracing.numbers = None  # for those who look for leaked tracers

        try:
            numbers = jax.ShapeDtypeStruct((3,), np.int32)
            closed, shapes = jax.make_jaxpr(with_numbers, axis_env=AXES, return_shape=True)(state, batch, numbers)
        except AdaptiveError:
            raise
        except Exception as error:  # raised by JAX or the driver
            told = explained(error, driver)
            if told is error:
                raise
            raise told from error
    return tracing, closed, shapes


def _pairings(eqns: Sequence[JaxprEqn]) -> Iterator[Pairing]:
    for eqn in eqns:
        for inner in (eqn, *nested_equations(eqn)):
            if inner.primitive is read_peer_p:
                yield inner.params["pairing"]


def _check_state(name: str, old: Any, new: Any) -> None:
    if jax.tree.structure(old) != jax.tree.structure(new):
        old_names, new_names = set(leaf_names(old, "state")), set(leaf_names(new, "state"))
        change = [f"without {n}" for n in sorted(old_names - new_names)]
        change += [f"with {n}" for n in sorted(new_names - old_names)]
        detail = "; ".join(change[:4]) or f"as {jax.tree.structure(new)}, not {jax.tree.structure(old)}"
        raise DriverError(
            f"driver {name!r} returns a state of another structure than its argument: {detail}. "
            "The returned state is the argument of the next step."
        )
    leaves = zip(leaf_names(old, "state"), jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    for leaf_name, before, after in leaves:
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise DriverError(
                f"driver {name!r} changes {leaf_name} from {before.dtype}{list(before.shape)} to "
                f"{after.dtype}{list(after.shape)}. A state must keep its shapes and dtypes"
                + (f": return it with .astype({before.dtype})." if before.shape == after.shape else ".")
            )


def _check_none_left_out(must_stay: Sequence[tuple[Any, str]], eqns: Sequence[JaxprEqn]) -> None:
    """Raise if JAX has dropped an operator without a result, as it does when it differentiates a nested jit."""
    there = {id(e.params["hook" if e.primitive is hook_p else "written"]) for e in eqns if e.primitive in _RESULTLESS}
    for mark, what in must_stay:
        if id(mark) not in there:
            raise CollectiveError(
                f"{what} is lost: it is inside a jax.jit or jax.checkpoint that is differentiated, where JAX drops "
                "operators without a result. Return the value from the differentiated function (has_aux=True), and "
                "apply the operator to it afterwards."
            )


class _Flattener:
    """Inliner of nested jaxprs: copies their equations, with new variables.

    Args:
      driver: the driver's name.
      on_mesh: see `trace`.
    """

    def __init__(self, driver: str, *, on_mesh: bool) -> None:
        self._driver, self._on_mesh = driver, on_mesh
        self.eqns: list[JaxprEqn] = []
        self.consts: dict[Var, Any] = {}
        self.sums: list[Sum] = []
        self.backward: set[Var] = set()  # results of collectives in a backward pass
        self._const_vars: dict[int, Var] = {}
        self._sources: dict[str, JaxprEqn] = {}
        self._made: dict[Atom, JaxprEqn] = {}  # the equation that computes each variable

    def inline(
        self, closed: ClosedJaxpr, args: Sequence[Atom], site: Any = None, *, backward: bool = False
    ) -> list[Atom]:
        """Copy the equations of a jaxpr, and return its results.

        Args:
          site: source information of the equation that calls it. JAX's own jitted functions (`jnp.where`, `jnp.var`)
            contain no line of the driver, so their equations get the caller's.
          backward: whether that equation is part of a backward pass.
        """
        env: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, args, strict=True))
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[var] = self._const(var, value)

        def look_up(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in closed.jaxpr.eqns:
            operands = [look_up(a) for a in eqn.invars]
            source = eqn.source_info if site is None or line_of(eqn.source_info) else site
            # Reverse-mode differentiation notes itself in the stack of names.
            in_backward = backward or "transpose(jvp(" in str(eqn.source_info.name_stack)
            if eqn.primitive is source_p and self._known_source(eqn):  # a source that is read twice is one value
                env[eqn.outvars[0]] = self._sources[eqn.params["source"].name].outvars[0]
                continue
            self._refuse_devices(eqn, eqn, source)
            function = called(eqn, derivatives=any(_operators_within(eqn)))
            if function is not None:
                results = self.inline(function, operands, source, backward=in_backward)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            if is_over_workers(eqn):
                means = self._mean_over_workers(eqn, operands, source, backward=in_backward)
                env.update(zip(eqn.outvars, means, strict=True))
                continue
            within = sorted(_operators_within(eqn), key=lambda e: e.primitive in _NO_MESSAGE)
            if within:  # a mean also reads a source that is not in the user's code
                raise _refusal(within[0], eqn)
            for inner in nested_equations(eqn):
                self._refuse_devices(inner, eqn, source)
            if has_references(eqn):
                raise CollectiveError(
                    f"a mutable array (jax.new_ref){at(line_of(eqn.source_info))}: a step runs as several programs, "
                    "which do not see each other's writes. Return new values instead:  x = x.at[i].set(y)"
                )
            if eqn.primitive in OPERATORS:
                operands = [self.as_variable(a) for a in operands]
            fresh = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, fresh, strict=True))
            self.eqns.append(eqn.replace(invars=operands, outvars=fresh, source_info=source))
            self._made.update((v, self.eqns[-1]) for v in fresh)
            if eqn.primitive is source_p:
                self._sources[eqn.params["source"].name] = self.eqns[-1]
            if eqn.primitive is collective_p and in_backward:
                self.backward.update(fresh)
        return [look_up(a) for a in closed.jaxpr.outvars]

    def _mean_over_workers(self, eqn: JaxprEqn, operands: list[Atom], source: Any, *, backward: bool) -> list[Atom]:
        """Copy one of JAX's own sums over the workers as a mean; see `adaptive/operators/axis.py`."""
        spread = before_spread(eqn.replace(invars=operands), self._made)
        if spread is None:
            results = self.inline(as_collective(eqn), operands, source, backward=backward)
            self.sums.append(Sum(eqn, operands, results, sizes_of(eqn)))
            return results
        mean = as_collective(eqn.replace(invars=spread.invars[:1]))
        means = self.inline(mean, spread.invars[:1], source, backward=backward)
        self.sums.append(Sum(eqn, spread.invars[:1], means, [spread_size(spread)]))
        wide = Var(spread.outvars[0].aval)
        self.eqns.append(spread.replace(invars=[means[0], *spread.invars[1:]], outvars=[wide]))
        return [wide]

    def as_variable(self, atom: Atom) -> Atom:
        """Return a variable for an output of the graph: a literal becomes a constant, because only variables can be
        marked as dependent on the batch's shape.
        """
        if not isinstance(atom, Literal):
            return atom
        var = Var(atom.aval)
        self.consts[var] = np.asarray(atom.val, atom.aval.dtype)  # keeps its dtype if JAX's x64 setting changes
        return var

    def _refuse_devices(self, eqn: JaxprEqn, outer: JaxprEqn, source: Any) -> None:
        if most_devices(eqn) > 1 and not self._on_mesh:
            raise DriverError(
                f"{holder(outer)}{at(line_of(eqn.source_info) or line_of(source))} is over {most_devices(eqn)} "
                "devices, but a driver runs on the one device of its worker: each device of a process is a worker of "
                "its own. Write the driver for one device, without jax.pmap, jax.shard_map and shardings, and reduce "
                "over the workers:  comm.all_reduce(x). Or make one worker of the devices:  comm.world(mesh=mesh)"
            )

    def _known_source(self, eqn: JaxprEqn) -> bool:
        source: Source = eqn.params["source"]
        known = self._sources.get(source.name)
        other = source if known is None else known.params["source"]
        if (other.scope, other.dtype) != (source.scope, source.dtype):
            raise CollectiveError(
                f"two different sources are named {source.name!r}{at(line_of(eqn.source_info))}. Rename one of them."
            )
        return known is not None

    def _const(self, var: Var, value: Any) -> Var:
        known = self._const_vars.get(id(value))
        if known is None:
            if isinstance(value, jax.core.Tracer):  # of another trace
                raise kept(self._driver)
            try:
                check_not_sharded(value)
            except NotAnArrayError as error:
                raise DriverError(f"an array that the driver closes over, {var.aval.str_short()}, {error}") from error
            known = self._const_vars[id(value)] = Var(var.aval)
            # Copied, because the user may modify the array later, and XLA may read it without a copy.
            self.consts[known] = value if isinstance(value, jax.Array) else np.array(value)
        return known


def _operators_within(eqn: JaxprEqn, *, shadowed: bool = False) -> Iterator[JaxprEqn]:
    """Yield the operators in the jaxprs nested in an equation, at any depth.

    Args:
      shadowed: whether the equation is within a `jax.shard_map` over an axis with the name of the workers' axis, so
        that reductions over that name are not over the workers.
    """
    shadowed = shadowed or WORKERS in axes_of(eqn)
    for jaxpr in nested(eqn):
        for inner in jaxpr.eqns:
            if inner.primitive in OPERATORS or (not shadowed and is_over_workers(inner)):
                yield inner
            yield from _operators_within(inner, shadowed=shadowed)


def operands_of(eqn: JaxprEqn) -> Sequence[Atom]:
    """Return the operands that an equation needs: all, or without the weight for a collective of replicated values."""
    if eqn.primitive is not collective_p:
        return eqn.invars
    values, _, when = operands(eqn.invars, eqn.params)
    return values if when is None else [*values, when]


def evaluate(
    eqns: Iterable[JaxprEqn], env: dict[Var, Any], compute: Callable[[JaxprEqn, list[Any]], Sequence[Any]]
) -> None:
    """Compute equations in order, and add their results to `env`, which has the values of all inputs.

    Args:
      compute: returns the results of an equation, of its operands.
    """
    for eqn in eqns:
        operands = [a.val if isinstance(a, Literal) else env[a] for a in operands_of(eqn)]
        env.update(zip(eqn.outvars, compute(eqn, operands), strict=True))


def describe(eqn: JaxprEqn) -> str:
    """Return the name of an operator's equation in the user's code: "all_reduce(op='mean')", "hook 'adapt'"."""
    params = eqn.params
    if is_over_workers(eqn):
        return "jax.lax.pmean"
    if eqn.primitive is collective_p:
        return params["how"].about
    if eqn.primitive is source_p:
        return f"source {params['source'].name!r}"
    if eqn.primitive is hook_p:
        return f"hook {params['hook'].name!r}"
    if eqn.primitive is assert_scope_p:
        return params["what"]
    return f"operator state {params['label']!r}" if eqn.primitive is state_read_p else "operator state"


def _refusal(inner: JaxprEqn, outer: JaxprEqn) -> CollectiveError:
    where = line_of(inner.source_info)
    advice = {
        "collective": "It would be sent again in the backward pass. Reduce the function's result instead."
        if is_checkpoint(outer)
        else "Values would decide whether and how often a message is sent. Collect the values in the loop (as its "
        "carry or its stacked outputs) and reduce them after it." + line_search_of(inner.source_info),
        "source": "Read it before the loop, and pass the value in.",
        "operator state": "Apply the operator to the loop's result.",
        "hook": "Pass the loop's result to the hook.",
        "assertion": "Apply it to the loop's result.",
    }[OPERATORS.get(inner.primitive, "collective")]
    return CollectiveError(f"{describe(inner)}{at(where)} is inside {holder(outer)}. {advice}")
