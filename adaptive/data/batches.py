"""Reject data that yield batches where examples are expected, or one part of a data set where all of it is."""

from __future__ import annotations

from typing import Any

from adaptive.base.errors import DataError

from . import grain_pipelines, torch_loaders

_BATCHING = (
    "_batch_fn",
    "_batch_arrow_table",
    "_batch_accumulate_arrow_table_by_columns",
)  # of Hugging Face's .batch()


def refuse_batches(data: Any) -> None:
    """Raise if `data` is known to yield batches. For other data, the notes show the shapes of an example.

    Raises:
      DataError: `data` is a torch loader with a batch size, a grain pipeline with a batch operation, or an
        `IterableDataset` of Hugging Face after `.batch()`.
    """
    if torch_loaders.is_loader(data) and torch_loaders.gives_batches(data):
        raise DataError(
            f"the {type(data).__name__} yields batches (batch_size={data.batch_size}). To split them into examples:  "
            "ad.data.from_iterator(loader, batched=True)"
        )
    how = grain_pipelines.batches_of(data) or _batches_of_hugging_face(data)
    if how:
        raise DataError(
            f"the data set yields batches: leave out {how}, because the program makes its own batches, of changing "
            "sizes. To split batches into examples:  ad.data.from_iterator(data, batched=True)"
        )


def refuse_parts(data: Any) -> None:
    """Raise if `data` is known to yield one part of a data set that is divided among processes.

    Raises:
      DataError: `data` yields one part. The program divides the examples itself.
    """
    parts = max(torch_loaders.replicas_of(data), grain_pipelines.shards_of(data), _nodes_of_hugging_face(data))
    if parts > 1:
        raise DataError(
            f"the data are one of {parts} parts of a data set (by a DistributedSampler, ShardOptions or "
            "split_dataset_by_node). Pass the whole data set on all processes: each takes its share of every global "
            "batch. Or pass each worker's own part:  ad.data.from_iterator(lambda worker, workers: …)"
        )


def _batches_of_hugging_face(data: Any) -> str:
    node = getattr(data, "_ex_iterable", None) if grain_pipelines.module_of(data) == "datasets" else None
    while node is not None:
        function = getattr(node, "function", None)
        function = getattr(function, "func", function)
        if getattr(function, "__name__", "") in _BATCHING:
            return ".batch(…)"
        if getattr(node, "batched", False):  # a batched map may turn one batch into any number of rows
            return ""
        node = getattr(node, "ex_iterable", None)
    return ""


def _nodes_of_hugging_face(data: Any) -> int:
    known = grain_pipelines.module_of(data) == "datasets"
    return int(getattr(getattr(data, "_distributed", None), "world_size", 1)) if known else 1
