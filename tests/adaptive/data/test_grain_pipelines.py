"""grain's pipelines, by the real library."""

from __future__ import annotations

import sys

import pytest

import adaptive as ad
from adaptive.data.adapters import examples_of
from tests.adaptive.data.epochs import N, check_epochs_and_restores, opened, refused, walk

COVERS = ("adaptive/data/batches.py",)

grain = pytest.importorskip("grain", reason="grain is not installed")


class AsDict(grain.transforms.Map):
    def map(self, element):
        return {"i": element}


class Cropped(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return {**element, "r": rng.random()}


def numbers():
    return grain.MapDataset.range(N).map(lambda i: {"i": i})


def loader(*operations, shuffle=False, shard_options=None, workers=0):
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, N, 1),
        sampler=grain.samplers.IndexSampler(N, shuffle=shuffle, seed=3, num_epochs=1),
        shard_options=shard_options or grain.sharding.NoSharding(),
        operations=[AsDict(), *operations],
        worker_count=workers,
    )


BATCH = grain.transforms.Batch(8, drop_remainder=True)
TAKEN = {
    "MapDataset": numbers,
    "MapDataset, shuffled": lambda: numbers().shuffle(seed=1),
    "IterDataset": lambda: numbers().to_iter_dataset(),
    "IterDataset, shuffled": lambda: grain.experimental.WindowShuffleIterDataset(
        numbers().to_iter_dataset(), window_size=5, seed=1
    ),
    "IterDataset, filtered": lambda: (
        grain.MapDataset.range(2 * N).filter(lambda i: i < N).map(lambda i: {"i": i}).to_iter_dataset()
    ),
    "batches": lambda: ad.data.from_iterator(numbers().batch(7).to_iter_dataset(), batched=True),
    "DataLoader": loader,
    "DataLoader, shuffled": lambda: loader(shuffle=True),
    "DataLoader of batches": lambda: ad.data.from_iterator(loader(BATCH, shuffle=True), batched=True),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_pipeline_is_taken_and_restored_to_the_same_examples(kind):
    check_epochs_and_restores(TAKEN[kind])


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers().seed(3).random_map(Cropped()),
        lambda: numbers().seed(3).random_map(Cropped()).to_iter_dataset(),
        lambda: loader(Cropped(), shuffle=True),
    ],
)
def test_random_maps_of_grain_are_restored_to_the_same_numbers(make):
    check_epochs_and_restores(make, leaf="r")


class SameBatch(grain.transforms.Map):
    def map(self, element):
        return element


BATCHES = {
    "MapDataset": lambda: numbers().batch(4),
    "below map": lambda: numbers().batch(4).map(lambda batch: batch),
    "below shuffle": lambda: numbers().batch(4).shuffle(seed=1),
    "below repeat": lambda: numbers().batch(4).repeat(2),
    "below slice": lambda: numbers().batch(4)[:2],
    "in concatenate": lambda: grain.MapDataset.concatenate([numbers().batch(4), numbers().batch(2)]),
    "in mix": lambda: grain.MapDataset.mix([numbers().batch(4), numbers().batch(4)]),
    "in zip": lambda: grain.experimental.ZipMapDataset([numbers().batch(4), numbers().batch(4)]),
    "IterDataset": lambda: numbers().to_iter_dataset().batch(4),
    "below to_iter_dataset": lambda: numbers().batch(4).to_iter_dataset(),
    "below mp_prefetch": lambda: (
        numbers().to_iter_dataset().batch(4).mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    ),
    "below ThreadPrefetch": lambda: grain.experimental.ThreadPrefetchIterDataset(
        numbers().to_iter_dataset().batch(4), prefetch_buffer_size=1
    ),
    "in mix of IterDatasets": lambda: grain.IterDataset.mix(
        [numbers().to_iter_dataset().batch(4), numbers().to_iter_dataset().batch(4)]
    ),
    "in interleave": lambda: grain.experimental.InterleaveIterDataset(
        [numbers().batch(4).to_iter_dataset()] * 2, cycle_length=2
    ),
    "in interleave of a MapDataset": lambda: grain.experimental.InterleaveIterDataset(
        grain.MapDataset.range(2).map(lambda i: numbers().batch(4).to_iter_dataset()), cycle_length=2
    ),
    "DataLoader": lambda: loader(BATCH),
    "DataLoader, below a map": lambda: loader(BATCH, SameBatch()),
    "DataLoader, packed": lambda: loader(
        grain.experimental.PackAndBatchOperation(batch_size=2, length_struct={"i": 4})
    ),
    "DataLoader with workers": lambda: loader(BATCH, workers=1),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_are_refused_wherever_they_are_made(kind):
    refused(BATCHES[kind](), "the data set yields batches")
    assert ad.data.from_iterator(BATCHES[kind](), batched=True).batched
    with pytest.raises(ad.DataError, match="the data set yields batches"):  # what a function returns is known later
        opened(ad.data.from_iterator(lambda: BATCHES[kind]()))


def test_batches_that_are_taken_apart_again_are_examples():
    class Apart(grain.experimental.FlatMapTransform):
        max_fan_out = 4

        def flat_map(self, batch):
            return [{"i": i} for i in batch["i"]]

    data = grain.experimental.FlatMapIterDataset(numbers().to_iter_dataset().batch(4), Apart())
    check_epochs_and_restores(lambda: data)


def test_a_pipeline_with_gaps_is_read_as_an_iterator():
    with pytest.raises(ad.DataError, match=r"with .filter\(\) .*\n?.* data.to_iter_dataset\(\)"):
        examples_of(numbers().filter(lambda example: example["i"] % 2 == 0).shuffle(seed=1))


def test_an_endless_pipeline_is_refused_without_reading_it():
    data = grain.MapDataset.range(20).map(lambda i: {"i": i})
    with pytest.raises(ad.DataError, match=f"len.data. is {sys.maxsize}: .* Leave out .repeat"):
        examples_of(data.repeat())
    assert len(examples_of(data.repeat(3))) == 60
    stream = opened(data.repeat().to_iter_dataset())
    assert walk(stream) == [i % 20 for i in range(56)]
    stream.close()


def test_a_part_for_each_process_is_refused_and_for_each_worker_is_taken():
    parts = [grain.sharding.ShardOptions(k, 2, drop_remainder=True) for k in range(2)]
    refused(loader(shard_options=parts[1]), "are one of 2 parts of a data set")
    stream = opened(ad.data.from_iterator(lambda worker, epoch: loader(shard_options=parts[worker])))
    assert walk(stream, [(2, 2)]) == [0, 2, 1, 3]
    stream.close()
