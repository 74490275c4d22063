"""The things that an operator may add to a traced driver: source, collective, slot, hook, claim.

Each is a JAX primitive, so a driver that uses them is an ordinary JAX dataflow graph. That they stand in the graph as
equations, and not in some list beside it, is what makes nested `jax.jit`s, `jax.grad` and re-tracing for another batch
size work with no care taken: whatever JAX does with a function, the graph that comes out says the same. Two things need
some: JAX's caches of traces, which do not know what a driver is traced for (see `trace_as`), and dead code elimination,
which takes operators without a result for dead (see `Tracing.must_stay`).

* a **source** is a scalar that the runtime measures and feeds in: a step number, seconds, batch sizes, free CPU;
* a **collective** combines a value over all workers;
* a **slot** is state that an operator carries from step to step, such as a moving average;
* a **hook** is a value that leaves the graph for Python, at the barrier behind the step;
* a **claim** says how widely a value is the same, where the graph cannot tell, or must not be otherwise.

Outside a program they execute eagerly: a source reads as its stand-in, a collective is carried out by the world that
was entered last (by nobody, where there is none: one worker), a slot starts at its initial value and forgets, and
hooks and claims are passed by. So `print` and `pdb` work in a driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._current import current_world
from ._decision import Handler
from ._eager import exchange_eagerly
from ._errors import CollectiveError
from ._where import at, current_line, line_search_of

Op = Literal["mean", "sum", "max", "min"]
T = TypeVar("T")


# --- sources ----------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """What the runtime knows of one worker at the start of a step; a source picks its value from here.

    `examples`, `calls` and `offset` differ between the kernel calls that make up a worker's batch.
    """

    step: int  # steps done before this one
    seed: int
    worker: int
    global_batch: int  # examples over all workers in this step
    batch_size: int  # examples of this worker in this step
    examples: int  # examples in this kernel call
    calls: int  # kernel calls that this value stands for: 1 inside a call
    offset: int  # position of the call's first example in the step's global batch
    compute_seconds: float  # the previous step's computation on this worker; NaN where not known
    iteration_seconds: float  # from the start of the previous step to the start of this one; NaN in the first


@dataclass(frozen=True, eq=False)
class Source:
    """A scalar that the runtime feeds into the graph.

    Attributes:
      name: what `explain()` calls it.
      read: picks or measures the value, once per worker and step ("call": once per kernel call).
      dtype: `float32` or `int32`.
      scope: where it is the same: "all" workers, all calls of one "worker", or one "call" only.
      stand_in: its value outside a program.
    """

    name: str
    read: Callable[[Reading], float]
    dtype: Any = np.float32
    scope: Literal["all", "worker", "call"] = "worker"
    stand_in: float = 0.0


EXAMPLES = Source("examples", lambda r: r.examples, scope="call", stand_in=1.0)
CALLS = Source("calls", lambda r: r.calls, scope="call", stand_in=1.0)
OFFSET = Source("offset", lambda r: r.offset, np.int32, scope="call")
STEP = Source("step", lambda r: r.step, np.int32, scope="all")
SEED = Source("seed", lambda r: r.seed & 0x7FFFFFFF, np.int32, scope="all")  # any Python integer will do
GLOBAL_BATCH = Source("global_batch", lambda r: r.global_batch, np.int32, scope="all", stand_in=1)
BATCH_SIZE = Source("batch_size", lambda r: r.batch_size, np.int32, stand_in=1)
WORKER = Source("worker", lambda r: r.worker, np.int32)

source_p = Primitive("source")
source_p.def_abstract_eval(lambda *, source: jax.core.ShapedArray((), source.dtype))


@source_p.def_impl
def _source_eager(*, source):
    # How many examples this process holds is not known outside a program: a mean over several workers must not
    # pretend that it is, and says so (see _eager).
    world = current_world.get()
    unknown = source is EXAMPLES and world is not None and world.size > 1
    return jnp.asarray(np.nan if unknown else source.stand_in, source.dtype)


def read(source: Source) -> jax.Array:
    """The source's value in this step: a scalar of its dtype; replicated or local as its scope says."""
    return source_p.bind(source=source)


# --- collectives ------------------------------------------------------------------------------------------------------

collective_p = Primitive("collective")
collective_p.multiple_results = True


def collective(
    kind: Literal["reduce", "gather", "broadcast"],
    leaves: Sequence[jax.Array],
    *,
    op: Op = "sum",
    weight: jax.Array | None = None,
    root: int = 0,
    names: Sequence[str] = (),
) -> list[jax.Array]:
    """Combine `leaves` over all workers: the primitive behind everything in `collectives`.

    Args:
      kind: "reduce" (by `op`), "gather" (one row per worker on a new leading axis) or "broadcast" (the root's value).
      leaves: arrays of any shape; local or replicated.
      op: for a reduction. "mean" is `sum_i w_i x_i / sum_i w_i`.
      weight: scalar `w_i`; for "mean" only.
      root: the worker whose value is broadcast.
      names: what to call each leaf in messages and errors.

    Returns:
      One replicated array per leaf.
    """
    trace, world = tracing(), current_world.get()
    n_workers = trace.workers if trace else world.size if world else 1
    # An empty leaf is its own result, and equal on all workers: nothing of it is sent.
    sent = [i for i, leaf in enumerate(leaves) if leaf.size]
    operands = [leaves[i] for i in sent] + ([weight] if op == "mean" and kind == "reduce" else [])
    params = {"kind": kind, "op": op if kind == "reduce" else "sum", "root": root, "workers": n_workers}
    named = tuple(names[i] for i in sent) if names else ()
    results = iter(collective_p.bind(*operands, names=named, **params) if sent else ())
    rows = (n_workers,) if kind == "gather" else ()
    return [next(results) if leaf.size else jnp.zeros((*rows, *leaf.shape), leaf.dtype) for leaf in leaves]


def n_values(params: dict[str, Any], n_operands: int) -> int:
    """How many of a collective's operands are values; the weight, where there is one, comes behind them."""
    return n_operands - (params["kind"] == "reduce" and params["op"] == "mean")


@collective_p.def_abstract_eval
def _collective_abstract(*operands, **params):
    values = operands[: n_values(params, len(operands))]
    if params["kind"] != "gather":
        return [jax.core.ShapedArray(v.shape, v.dtype) for v in values]
    return [jax.core.ShapedArray((params["workers"], *v.shape), v.dtype) for v in values]


@collective_p.def_impl
def _collective_eager(*operands, kind, op, root, names, workers):
    values = operands[: n_values({"kind": kind, "op": op}, len(operands))]
    weight = operands[-1] if len(values) < len(operands) else None
    return exchange_eagerly(kind, values, op=op, weight=weight, root=root)


def _collective_jvp(primals, tangents, **params):
    # Linear in its values, so tangents are combined as values are: with the same weights. A weight that itself is
    # differentiated, and the extremes, have no such rule.
    n = n_values(params, len(primals))
    moving_weight = n < len(primals) and not isinstance(tangents[-1], ad.Zero)
    if params["op"] in ("max", "min") or moving_weight:
        what = "its weight" if moving_weight else f"op={params['op']!r}"
        raise CollectiveError(
            f"all_reduce cannot be differentiated with respect to {what}{at(current_line())}. "
            "Differentiate the local value and reduce the gradient."
        )
    dense = [ad.instantiate_zeros(t) for t in tangents[:n]]
    return collective_p.bind(*primals, **params), collective_p.bind(*dense, *primals[n:], **params)


def _collective_transpose(cotangents, *operands, **params):
    kind = {"reduce": "all_reduce", "gather": "all_gather"}.get(params["kind"], params["kind"])
    raise CollectiveError(  # JAX transposes an equation in the place of the driver that it stems from
        f"reverse-mode differentiation through a collective: jax.grad of a function that calls comm.{kind}"
        f"{at(current_line())}. Each "
        "worker would get only its own share of the gradient. Differentiate the local loss, then reduce:\n"
        "    loss, grads = jax.value_and_grad(local_loss)(params, batch)\n"
        "    grads = comm.all_reduce(grads)" + line_search_of(source_info_util.current())
    )


def _collective_batch(operands, dims, *, kind, **params):
    n = n_values({"kind": kind, **params}, len(operands))
    if n < len(operands) and dims[-1] is not None:
        raise CollectiveError(
            f"all_reduce: weight= must be one scalar per worker, not mapped by vmap{at(current_line())}."
        )
    results = collective_p.bind(*operands, kind=kind, **params)
    moved = [d if d is None or kind != "gather" else d + 1 for d in dims[:n]]  # None: not mapped
    return results, moved


ad.primitive_jvps[collective_p] = _collective_jvp
ad.primitive_transposes[collective_p] = _collective_transpose
batching.primitive_batchers[collective_p] = _collective_batch


# --- slots ------------------------------------------------------------------------------------------------------------


class Frozen:
    """A pytree leaf list as a primitive's parameter: hashable, compared by content."""

    def __init__(self, leaves: Sequence[Any]):
        self.leaves = [np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)) for leaf in leaves]
        self._key = tuple((a.shape, str(a.dtype), a.tobytes()) for a in self.leaves)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._key == other._key

    def __repr__(self) -> str:
        return f"Frozen({', '.join(f'{a.dtype}{list(a.shape)}' for a in self.leaves)})"


slot_read_p = Primitive("slot_read")  # -> handle, *values. The handle ties a slot's write to its read.
slot_write_p = Primitive("slot_write")  # handle, *values ->
hook_p = Primitive("hook")  # *values ->
for _p in (slot_read_p, slot_write_p, hook_p):
    _p.multiple_results = True

_HANDLE = jax.core.ShapedArray((), np.dtype(np.int32))
slot_read_p.def_abstract_eval(
    lambda *, label, init: [_HANDLE, *(jax.core.ShapedArray(a.shape, a.dtype) for a in init.leaves)]
)
slot_read_p.def_impl(lambda *, label, init: [np.int32(0), *map(jnp.asarray, init.leaves)])
slot_write_p.def_abstract_eval(lambda *operands, written: [])
slot_write_p.def_impl(lambda *operands, written: [])
hook_p.def_abstract_eval(lambda *operands, hook: [])
hook_p.def_impl(lambda *operands, hook: [])


def slot(label: str, init: Any, update: Callable[[Any], tuple[Any, Any]]) -> Any:
    """Carry state from step to step.

    Args:
      label: what to call it in `explain()` and in checkpoints, where slots of one label are numbered.
      init: the state before the first step: a pytree of arrays and numbers (no tracers).
      update: traced; takes the state, returns `(new state, result)`.

    Returns:
      `result`. The new state is replicated where all that it is computed from is.
    """
    leaves, tree = jax.tree.flatten(init)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise CollectiveError(
            f"slot {label!r}{at(current_line())}: its initial state must be known before the first step, but is "
            "computed in the driver. Give plain arrays; shapes may come from traced values (jnp.zeros(x.shape))."
        )
    handle, *old = slot_read_p.bind(label=label, init=Frozen(leaves))
    new, result = update(jax.tree.unflatten(tree, old))
    new_leaves, new_tree = jax.tree.flatten(new)
    if new_tree != tree or any(jnp.shape(n) != jnp.shape(o) for n, o in zip(new_leaves, old, strict=True)):
        raise CollectiveError(
            f"slot {label!r}{at(current_line())}: update() must return a state shaped like its initial one; "
            f"got {jax.tree.map(jnp.shape, new)} for {jax.tree.map(jnp.shape, init)}."
        )
    cast = [jnp.asarray(n).astype(o.dtype) for n, o in zip(new_leaves, old, strict=True)]
    slot_write_p.bind(handle, *cast, written=_stays(f"slot {label!r}"))
    return result


def _inert_jvp(primitive):
    """Values that leave the graph, and state, take no part in derivatives."""

    def jvp(primals, tangents, **params):
        del tangents
        return primitive.bind(*primals, **params), []

    return jvp


def _refuse_batch(operands, dims, **params):
    raise CollectiveError(
        f"a hook or slot is mapped by jax.vmap{at(current_line())}. Move it out of the mapped function."
    )


for _p in (slot_write_p, hook_p):
    ad.primitive_jvps[_p] = _inert_jvp(_p)
    batching.primitive_batchers[_p] = _refuse_batch


# --- hooks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Hook:
    """A value's way out: who handles it, how often, and how the leaves are put together again."""

    name: str
    handler: Handler
    every: int
    tree: jax.tree_util.PyTreeDef


def hook(name: str, handler: Handler, values: tuple[Any, ...], *, every: int = 1) -> None:
    """Hand `values` (replicated) to `handler` at the barrier behind every `every`-th step."""
    leaves, tree = jax.tree.flatten(values)
    hook = Hook(name, handler, every, tree)
    _stays(f"hook {name!r}", hook)
    hook_p.bind(*map(jnp.asarray, leaves), hook=hook)


# --- claims -----------------------------------------------------------------------------------------------------------

claim_p = Primitive("claim")  # *values -> *values
claim_p.multiple_results = True
claim_p.def_abstract_eval(lambda *operands, claim, what: list(operands))
claim_p.def_impl(lambda *operands, claim, what: list(operands))


def claim(claim: Literal["replicated", "local"], tree: T, what: str) -> T:
    """Values as they are, with a claim on how widely they are the same.

    Args:
      claim: "replicated": the user vouches that values which the graph takes for a worker's own (what a callback brings
        from the host) are equal on all workers. "local": at least one leaf must differ between workers; a driver in
        which all are replicated is refused.
      what: who claims it, for errors.
    """
    leaves, tree_of = jax.tree.flatten(tree)
    if not leaves:
        return tree
    return jax.tree.unflatten(tree_of, claim_p.bind(*map(jnp.asarray, leaves), claim=claim, what=what))


def _claim_jvp(primals, tangents, **params):
    dense = [ad.instantiate_zeros(t) for t in tangents]
    return claim_p.bind(*primals, **params), claim_p.bind(*dense, **params)


def _claim_batch(operands, dims, **params):
    return claim_p.bind(*operands, **params), dims


ad.primitive_jvps[claim_p] = _claim_jvp
ad.primitive_transposes[claim_p] = lambda cotangents, *operands, **params: list(cotangents)
batching.primitive_batchers[claim_p] = _claim_batch


# --- the trace in progress --------------------------------------------------------------------------------------------


class Tracing(NamedTuple):
    """What is fixed while a driver is traced: numbers that shapes may be made of.

    `must_stay` lists the operators without a result that the driver has called: what marks each one's equation, and
    what to call it in an error if there is none in the graph. `minibatches` lists what the driver cuts its batch into,
    and where.
    """

    workers: int
    examples: int
    must_stay: list[tuple[Any, str]]
    minibatches: list[tuple[int, str]]


class Mark:
    """Tells one write to a slot from others."""


def _stays(what: str, mark: Any = None) -> Any:
    """Note that an equation has to be in the graph, by a parameter of it; a new `Mark` if there is none."""
    mark, trace = mark or Mark(), tracing()
    if trace is not None:
        trace.must_stay.append((mark, what + at(current_line())))
    return mark


_tracing: ContextVar[Tracing | None] = ContextVar("adaptive_tracing", default=None)


def tracing() -> Tracing | None:
    """The trace in progress, or `None` where a driver executes eagerly."""
    return _tracing.get()


# JAX keeps the trace of a nested jax.jit by the shapes that it is called with. What a driver is traced for is no
# argument, so a helper that makes shapes of it would be given those of another trace; a context makes JAX tell them
# apart. One per trace, and not per numbers: an operator that JAX leaves out would be missed in the first trace alone.
_trace_cache_key = jax.make_user_context(default_value=0)
_traces = itertools.count(1)


@contextmanager
def trace_as(workers: int, examples: int) -> Iterator[Tracing]:
    """Trace a driver for that many workers, and examples in a call."""
    trace = Tracing(workers, examples, [], [])
    token = _tracing.set(trace)
    try:
        with _trace_cache_key(next(_traces)):
            yield trace
    finally:
        _tracing.reset(token)


# --- not in a program -------------------------------------------------------------------------------------------------


def _refuse_to_compile(context, *operands, **params):
    raise CollectiveError(
        "an operator (a collective, monitor, hook, or a value such as ad.step()) is compiled by jax.jit outside a "
        "program. Run the driver in an ad.Program, or eagerly:\n"
        "    with jax.disable_jit():\n"
        "        driver(state, batch)"
    )


for _p in (source_p, collective_p, slot_read_p, slot_write_p, hook_p, claim_p):
    mlir.register_lowering(_p, _refuse_to_compile)
