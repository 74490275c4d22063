"""Data sets of Hugging Face, by the real library."""

from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
from adaptive.data.adapters import examples_of
from adaptive.data.shards import stream_of
from adaptive.data.stream import Stream
from tests.on_use import on_use

datasets = on_use("datasets")

N = 24
PLAN = [(4, 3), (2, 6), (5, 0), (4, 4), (3, 6), (7, 2), (5, 5)]  # 56 examples: two epochs and a part of the third


def opened(data):
    return Stream(stream_of(data, 2, range(2)), seed=0, workers=range(2))


def walk(stream, plan=PLAN, leaf="i"):
    """What the examples that are taken hold, in order."""
    seen = []
    for sizes in plan:
        share = stream.take(sizes)
        stream.prefetch(sizes)
        stream.advance(sizes)
        seen += [value for batch in share.batches if batch is not None for value in batch[leaf].tolist()]
    return seen


def check_epochs_and_restores(make, leaf="i"):
    """Each example once per epoch, and the same examples from any step on as in an unbroken run."""
    stream = opened(make())
    whole = walk(stream, leaf=leaf)
    stream.close()
    if leaf == "i":
        assert sorted(whole[:N]) == sorted(whole[N : 2 * N]) == list(range(N))
    for steps in (2, 5):
        first, other = opened(make()), opened(make())
        begun = walk(first, PLAN[:steps], leaf)
        other.go_on(first.cursors, first.place())
        assert begun + walk(other, PLAN[steps:], leaf) == whole
        first.close()
        other.close()
    return whole


def refused(data, says):
    for take in (examples_of, ad.data.from_iterator):
        with pytest.raises(ad.DataError) as error:
            take(data)
        assert says in str(error.value)


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
        refused(data, "the data set gives batches: leave out .batch(…)")
    part = split_dataset_by_node(shards(), rank=1, world_size=2)
    refused(part, "are one of 2 parts of a data set")
    flat = shards().batch(4).map(lambda batch: {"i": np.concatenate(batch["i"])}, batched=True, remove_columns=["x"])
    assert walk(opened(flat), [(2, 1)]) == [0, 3, 6]  # a map that makes examples of them again
