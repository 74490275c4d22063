"""What to write instead of data that `Program` does not take: one table, of types to the line to write.

Types of other libraries are recognized by the names of their modules and classes, so that none is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from adaptive.base.errors import DataError


class Advice(NamedTuple):
    """A row of the table."""

    kind: str  # the class, as "package.Class"; classes derived from it have the same advice
    write: str  # the expression to write, in which the object is called `data`
    why: str  # a sentence before it
    when: Callable[[Any], bool] = lambda _: True  # whether the row holds for an object of that class


_BATCHES = "The program makes its own batches, of changing sizes, and its own order."
_COLUMNS = "A batch has an array for each column."
_ROWS = "If the data do not fit in memory, pass an object whose data[i] reads row i."
_EXAMPLES = "Without an index, examples are taken in the iterator's order."
_ITERATE = "ad.data.from_iterator(lambda: iter(data))"
SPLIT = (
    "ad.data.from_iterator(lambda: (jax.tree.map(lambda x: x[i], batch) for batch in data "
    "for i in range(len(jax.tree.leaves(batch)[0]))))"
)


def _iterates(loader: Any) -> bool:
    return "torch.IterableDataset" in _kinds(loader.dataset)


TABLE = (
    Advice("torch.DataLoader", "ad.data.from_iterator(lambda: iter(data.dataset))", _BATCHES, _iterates),
    Advice("torch.DataLoader", "data.dataset", _BATCHES),
    Advice("grain.MapDataset", "data without .batch(…)", _BATCHES, lambda data: _has_node(data, "Batch")),
    Advice(
        "grain.MapDataset",
        "ad.data.from_iterator(lambda: iter(data.to_iter_dataset()))",
        "After .filter() or .flat_map() some indices have no example.",
        lambda data: _has_node(data, "FilterMap") or _has_node(data, "FlatMap"),
    ),
    Advice("grain.IterDataset", _ITERATE, _EXAMPLES),
    Advice("grain.DataLoader", _ITERATE, _EXAMPLES),
    Advice("datasets.DatasetDict", 'data["train"]', "Pass one split."),
    Advice("datasets.IterableDatasetDict", 'data["train"]', "Pass one split."),
    Advice(
        "datasets.IterableDataset",
        "ad.data.from_iterator(lambda: iter(data), map=lambda row: {k: np.asarray(v) for k, v in row.items()})",
        _EXAMPLES,
    ),
    Advice("torch.IterableDataset", _ITERATE, _EXAMPLES),  # after that of datasets, which is derived from it
    Advice(
        "datasets.Dataset",
        'data.with_format("numpy")',
        "Without a format its rows are lists. Leave out columns of text by .select_columns([…]).",
        lambda data: data.format["type"] is None,
    ),
    Advice("datasets.Column", "np.asarray(data[:])", "A column is no array."),
    Advice("tensorflow.DatasetV2", "ad.data.from_iterator(data.as_numpy_iterator)", _EXAMPLES),
    Advice("pandas.DataFrame", "{c: data[c].to_numpy() for c in data}", _COLUMNS),
    Advice("polars.DataFrame", "{c: data[c].to_numpy() for c in data.columns}", _COLUMNS),
    Advice("pyarrow.Table", "{c: data[c].to_numpy() for c in data.column_names}", _COLUMNS),
    Advice("h5py.Group", "{name: data[name][:] for name in data}", _ROWS),
    Advice("h5py.Dataset", "data[:]", _ROWS),
    Advice("zarr.Group", "{name: array[:] for name, array in data.arrays()}", _ROWS),
    Advice("zarr.Array", "data[:]", _ROWS),
    Advice("numpy.NpzFile", "dict(data)", "JAX takes the file for a single leaf."),
    Advice(
        "builtins.list",
        "jax.tree.map(lambda *xs: np.stack(xs), *data)",
        "A list may be examples or columns. Write tuple(data) if each item is an array with a row per example, "
        "ad.Shards(data) if each is a worker's data set. To stack examples:",
    ),
    Advice(
        "adaptive.FromIterator",
        "jax.tree.map(lambda *xs: np.stack(xs), *rows(0))",
        "These data have no index, and can be neither divided by `evaluate` nor a shard. To train each worker on an "
        "iterator of its own:  ad.data.from_iterator(lambda worker: …)  If they fit in memory, stack them.",
    ),
    Advice("builtins.set", "np.asarray(sorted(data))", "A set has no order."),
    Advice("builtins.str", "np.load(data)", "Text is no data set. Read the file."),
)


def refuse_foreign(data: Any, name: str = "data") -> None:
    """Raise a DataError with the line to write if the table has a row for an object, or it can only be iterated."""
    kinds = _kinds(data)
    for row in TABLE:
        if row.kind in kinds and row.when(data):
            raise DataError(f"{name} is a {type(data).__name__}. {row.why} Write  {row.write}")
    if isinstance(data, type):
        raise DataError(f"{name} is the class {data.__name__}. Create an object:  {data.__name__}(…)")
    if hasattr(data, "__next__"):
        refuse_spent(data)
    if hasattr(type(data), "__array__") or not jax.tree_util.all_leaves([data]) or hasattr(data, "__getitem__"):
        return
    if hasattr(data, "__iter__"):
        raise DataError(f"{name} is a {type(data).__name__}, without an index. Write  {_ITERATE}")
    if callable(data):
        called = getattr(data, "__name__", "make")
        raise DataError(f"{name} is a function. If it returns an iterator, write  ad.data.from_iterator({called})")


def refuse_spent(data: Any) -> None:
    """Raise a DataError for an iterator, which can be iterated over only once."""
    raise DataError(
        f"a {type(data).__name__} can be iterated over only once: not for a second epoch, and not again after a "
        "restore. Pass a function that returns it:  ad.data.from_iterator(lambda: …)"
    )


def refuse_batches(data: Any) -> None:
    """Raise a DataError if an iterable is known to yield batches. Else the notes show the shapes of an example."""
    if "torch.DataLoader" in _kinds(data) and data.batch_size is not None:
        raise DataError(
            f"the DataLoader yields batches (batch_size={data.batch_size}). Set batch_size=None; its order must be the "
            f"same on all processes. Or split the batches:  {SPLIT}"
        )
    if _has_node(data, "Batch"):
        raise DataError(f"the grain data set yields batches. Leave out .batch(…). Or split the batches:  {SPLIT}")


def _kinds(data: Any) -> set[str]:
    """Return the classes of an object, as "package.Class"."""
    return {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(data).__mro__}


def _has_node(data: Any, prefix: str) -> bool:
    """Return whether a grain pipeline has an operation of this kind, after the last one that regroups examples."""
    while type(data).__module__.partition(".")[0] == "grain":
        if type(data).__name__.startswith(prefix):
            return True
        parents = getattr(data, "_parents", ())
        if not parents or type(data).__name__.startswith(("Rebatch", "ConcatThenSplit", "Pack")):
            return False
        data = parents[0]
    return False
