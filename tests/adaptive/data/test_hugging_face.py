"""Data sets of Hugging Face, by the real library."""

from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
from tests.adaptive.data.epochs import N, check_epochs_and_restores, opened, refused, walk
from tests.on_use import on_use

datasets = on_use("datasets")


def table():
    return datasets.Dataset.from_dict({"i": list(range(N)), "x": [[k, k + 1] for k in range(N)]})


def shards():
    """Files, as they are streamed."""

    def rows(parts):
        for part in parts:
            yield from ({"i": i, "x": [i, i + 1]} for i in range(part, N, 3))

    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": [0, 1, 2]})


OF_HUGGING_FACE = {
    "Dataset": table,
    "Dataset, numpy": lambda: table().with_format("numpy"),
    "Dataset, shuffled": lambda: table().shuffle(seed=1),
    "IterableDataset": shards,
    "IterableDataset of a Dataset": lambda: table().to_iterable_dataset(num_shards=3),
    "IterableDataset, numpy": lambda: table().to_iterable_dataset().with_format("numpy"),
    "IterableDataset, shuffled": lambda: shards().shuffle(seed=1, buffer_size=7),
    "batches": lambda: ad.data.from_iterator(shards().shuffle(seed=1, buffer_size=7).batch(5), batched=True),
}


@pytest.mark.parametrize("kind", OF_HUGGING_FACE)
def test_data_of_hugging_face_are_taken_and_restored_to_the_same_examples(kind):
    whole = check_epochs_and_restores(OF_HUGGING_FACE[kind])
    assert ("shuffled" not in kind) or whole[:N] != whole[N : 2 * N]  # set_epoch is called
    stream = opened(OF_HUGGING_FACE[kind]())
    (batch,) = stream.take((4, 0)).batches[:1]
    assert batch["x"].tolist() == [[i, i + 1] for i in batch["i"].tolist()]
    stream.close()


def test_batches_and_parts_of_hugging_face_are_refused():
    from datasets.distributed import split_dataset_by_node

    for data in (shards().batch(4), shards().batch(4).map(lambda batch: batch), table().to_iterable_dataset().batch(2)):
        refused(data, "the data set yields batches: leave out .batch(…)")
    part = split_dataset_by_node(shards(), rank=1, world_size=2)
    refused(part, "are one of 2 parts of a data set")
    flat = shards().batch(4).map(lambda batch: {"i": np.concatenate(batch["i"])}, batched=True, remove_columns=["x"])
    assert walk(opened(flat), [(2, 1)]) == [0, 3, 6]  # a map that makes examples of them again
