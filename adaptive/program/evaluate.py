"""Exact means, sums, merged metrics and rows over a data set, over all workers: every example counts once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, get_args

import jax
import numpy as np

from adaptive.base.errors import CollectiveError, DriverError
from adaptive.base.process.cores import n_cores
from adaptive.base.roster import with_same_members
from adaptive.base.split import positive
from adaptive.base.values.jaxprs import ClosedJaxpr
from adaptive.base.values.tree_paths import leaf_names
from adaptive.base.world import World
from adaptive.check.means import MeanCheck, Op
from adaptive.control.build_agreement import compare_across_processes, digest_of_text, digest_of_tree
from adaptive.data.rows import Rows, rows_of
from adaptive.data.same_data import digests_of_data
from adaptive.graph.text import as_text
from adaptive.runtime.kernels.compile import side_by_side

_AHEAD = 2  # batches per worker in progress: one is computed while the next is fetched
_SAME_ON_ALL = (
    "Every rank must evaluate the same function on the same whole data set, in batches of one size: "
    "evaluate itself distributes the batches over the workers."
)


def evaluate(
    fn: Callable,
    states: Sequence[Any],
    data: Any,
    world: World,
    batch: int,
    about: str = "",
    members: Sequence[int] | None = None,
    op: Op = "mean",
    check: MeanCheck | None = None,
) -> Any:
    """Return means, sums or rows of `fn(state, batch)` over `data`, and merged metrics. Communicates once. Raises a
    DriverError, and others, as `Program.evaluate` does.

    Args:
      states: the user's state, where each worker of this process computes.
      members: the workers that take part; by default the world's members.
    """
    if not callable(fn):
        raise DriverError(f"evaluate(fn, data): fn must be a function fn(state, batch); got a {type(fn).__name__}.")
    if op not in get_args(Op):
        raise DriverError(f'evaluate: op must be "mean", "sum" or "rows"; got {op!r}.')
    members = world.members if members is None else members
    there = (state for worker, state in zip(world.workers, states, strict=True) if worker in members)
    state = next(there, states[0])  # a process without workers traces the same function
    check = check or MeanCheck()

    def of_those_left() -> tuple[list[Any], int, Any]:
        rows, each = rows_of(data), positive("batch", batch)
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(state, rows.shapes(min(each, len(rows))))
        _check(fn, shapes, state, rows, each, op)
        named = [(name, len(jax.tree.leaves(node)), is_metric(node)) for name, node in _named(shapes)]
        combined = [None if merged else name for name, n, merged in named for _ in range(n)]
        left = [worker for worker in members if worker in world.members]
        try:
            check(fn, state, rows.rows, (len(rows), each), combined, op)
            parts = _gathered(fn, shapes, states, rows, world, left, each, op)
        except CollectiveError as error:
            error.add_note(
                "evaluate itself combines what fn returns for the batches of all workers: no all_reduce in fn."
            )
            raise
        digests = _digests(closed, shapes, rows, each, op) if world.processes > 1 else {}
        own = [part.value for part in parts]
        return compare_across_processes(world, about, digests, own, _SAME_ON_ALL), len(rows), shapes

    everyone, examples, shapes = with_same_members(world, of_those_left)
    parts = _parts_of(shapes, op)
    for sent in everyone:
        for part, value in zip(parts, sent, strict=True):
            part.receive(value)
    return jax.tree.structure(shapes, is_leaf=is_metric).unflatten([part.result(examples) for part in parts])


def _named(values: Any) -> list[tuple[str, Any]]:
    """Return the arrays and metrics that `fn` returns, with their names for errors."""
    named, _ = jax.tree.flatten_with_path(values, is_leaf=is_metric)
    return [(jax.tree_util.keystr(path) or "what fn returns", node) for path, node in named]


def is_metric(node: Any) -> bool:
    """Return whether a node of a pytree is a metric that can be merged, such as those of clu and metrax."""
    return hasattr(node, "compute") and hasattr(node, "merge")


class _Array:
    """The sum of an array over batches, in double precision; for a mean, weighted by the examples of each batch."""

    def __init__(self, leaf: Any, op: str):
        self._mean = op == "mean"
        exact = np.issubdtype(leaf.dtype, np.integer) or leaf.dtype == bool
        dtype = np.int64 if exact and not self._mean else np.result_type(leaf.dtype, np.float64)
        self.value = np.zeros(leaf.shape, dtype)

    def add(self, value: Any, examples: range) -> None:
        self.value += (len(examples) if self._mean else 1) * np.asarray(value).astype(self.value.dtype)

    def receive(self, total: np.ndarray) -> None:
        self.value += total

    def result(self, examples: int) -> np.ndarray:
        return self.value / examples if self._mean else self.value


class _Rows:
    """The rows of all examples, each batch's by the number of its first example."""

    def __init__(self) -> None:
        self.value: dict[int, np.ndarray] = {}

    def add(self, value: Any, examples: range) -> None:
        self.value[examples.start] = np.asarray(value)

    def receive(self, batches: dict[int, np.ndarray]) -> None:
        self.value |= batches

    def result(self, examples: int) -> np.ndarray:
        return np.concatenate([self.value[start] for start in sorted(self.value)])


class _Metric:
    """A metric, merged by its own rule on the host, in double precision, so that counts are exact beyond 2^24.

    A metric that keeps examples grows with each merge. Its parts are merged at the end.
    """

    def __init__(self, like: Any):
        leaves, self._tree = jax.tree.flatten(like)
        self._dtypes = [leaf.dtype for leaf in leaves]
        self.value: list[list[np.ndarray]] = []  # leaves of each part; a single part if the metric does not grow

    def add(self, value: Any, examples: range) -> None:
        wide = (np.asarray(leaf) for leaf in jax.tree.leaves(value))
        self.receive([[leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf for leaf in wide]])

    def receive(self, parts: list[list[np.ndarray]]) -> None:
        for part in parts:
            merged = self._tree.unflatten(self.value[-1]).merge(self._tree.unflatten(part)) if self.value else None
            if merged is not None and jax.tree.structure(merged) == self._tree:
                self.value[-1] = [np.asarray(leaf) for leaf in jax.tree.leaves(merged)]
            else:
                self.value.append(part)

    def result(self, examples: int) -> Any:
        parts = [[leaf.astype(d) for leaf, d in zip(part, self._dtypes, strict=True)] for part in self.value]
        return reduce(lambda a, b: a.merge(b), map(self._tree.unflatten, parts))


_Part = _Array | _Rows | _Metric


def _parts_of(shapes: Any, op: str) -> list[_Part]:
    nodes = jax.tree.leaves(shapes, is_leaf=is_metric)
    return [_Metric(node) if is_metric(node) else _Rows() if op == "rows" else _Array(node, op) for node in nodes]


def _digests(closed: ClosedJaxpr, shapes: Any, rows: Rows, batch: int, op: str) -> dict[str, str]:
    """Return digests of all that must be equal on all processes, by name for errors."""
    jaxpr = closed.jaxpr
    lines = [line.text for line in as_text([*jaxpr.invars, *jaxpr.constvars], jaxpr.eqns, jaxpr.outvars)]
    leaves = zip(leaf_names(shapes, ""), jax.tree.leaves(shapes), strict=True)
    return {
        "batch": str(batch),
        "op": op,
        "the data set": ", ".join(digests_of_data(rows).values()),
        "what fn returns": ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}".strip() for name, leaf in leaves),
        "fn": f"{len(jaxpr.eqns)} equations, {digest_of_text(repr((lines, digest_of_tree(closed.consts))))}",
    }


def _check(fn: Callable, shapes: Any, state: Any, data: Rows, batch: int, op: str) -> None:
    """Check that metrics can be merged, and that other values do not depend on how a batch is split."""
    nodes = jax.tree.leaves(shapes, is_leaf=lambda node: hasattr(node, "compute"))
    unmergeable = [type(node).__name__ for node in nodes if hasattr(node, "compute") and not is_metric(node)]
    if unmergeable and op == "mean":
        raise DriverError(
            f"evaluate: {unmergeable[0]} has no merge(other) to combine the metrics of two batches, and the mean over "
            "batches isn't one over examples. If it consists of sums, like flax nnx's Average and Accuracy, write\n"
            '    program.evaluate(fn, data, op="sum").compute()'
        )
    full, others = min(batch, len(data)), shapes
    last = len(data) % full
    if last:
        others = jax.eval_shape(fn, state, data.shapes(last))
    else:  # all batches have one size: check with another one, unless fn accepts this size only
        last = full + 1
        with suppress(Exception):
            others = jax.eval_shape(fn, state, data.shapes(last))
    rows_of_other = full if others is shapes else last
    for (name, leaf), other in zip(_named(shapes), jax.tree.leaves(others, is_leaf=is_metric), strict=True):
        if is_metric(leaf):
            continue
        found = f"evaluate: {name} has shape {leaf.shape} for a batch of {full} examples"
        if op == "rows" and (leaf.shape[:1] != (full,) or other.shape != (rows_of_other, *leaf.shape[1:])):
            raise DriverError(f'{found}. With op="rows" it must have one row per example; shape=(examples, …).')
        if op != "rows" and leaf.shape != other.shape:
            raise DriverError(
                f"{found} and {other.shape} for a batch of {last}. It must be a {op} over the examples:  "
                f'jnp.{op}(correct). For one row per example:  evaluate(fn, data, op="rows")'
            )


def _gathered(
    fn: Callable,
    shapes: Any,
    states: Sequence[Any],
    data: Rows,
    world: World,
    members: Sequence[int],
    batch: int,
    op: str,
) -> list[_Part]:
    """Return the values of this process's workers on their part of the examples; a list over the leaves of `fn`.

    The first batch of each worker and size is read in advance, so that its program is compiled beside the others.
    """
    call = jax.jit(fn)
    parts = _parts_of(shapes, op)
    batches = [*_shares(len(data), batch, world, members)]
    first = {(local, stop - start): (local, start, stop) for local, start, stop in reversed(batches)}

    def read(local: int, start: int, stop: int) -> Any:
        target = world.targets[local] if world.local_mesh is None else world.local_mesh.of_batch(stop - start)
        return jax.device_put(data.rows(np.arange(start, stop)), target)

    in_advance = {each: read(*each) for each in first.values()}
    side_by_side([call.lower(states[each[0]], rows).compile for each, rows in in_advance.items()], most=n_cores())
    under_way: deque[tuple[range, list[Any]]] = deque()

    def take_in() -> None:
        examples, values = under_way.popleft()
        for part, value in zip(parts, values, strict=True):
            part.add(value, examples)

    for local, start, stop in batches:
        rows = in_advance.pop((local, start, stop), None)
        values = call(states[local], read(local, start, stop) if rows is None else rows)
        under_way.append((range(start, stop), jax.tree.leaves(values, is_leaf=is_metric)))
        if len(under_way) > _AHEAD * len(states):
            take_in()
    while under_way:
        take_in()
    return parts


def _shares(examples: int, batch: int, world: World, members: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the batches of this process's workers: (local index, first example, end)."""
    for number, start in enumerate(range(0, examples, batch)):
        worker = members[number % len(members)]
        if worker in world.workers:
            yield worker - world.workers.start, start, min(start + batch, examples)
