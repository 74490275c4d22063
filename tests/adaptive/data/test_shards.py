"""Data of each worker's own: each shard once per epoch of the shard, whatever is resized."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adaptive as ad
import collectives as comm
from adaptive.data.stream import Stream
from adaptive.runtime.local_world import LocalWorld

from .streams import Source, batches, numbered

LENGTHS = (7, 12, 5)


def shards_of(lengths=LENGTHS) -> ad.Shards:
    """Shards whose examples are numbered end to end."""
    starts = np.cumsum([0, *lengths])
    return ad.Shards([numbered(n, int(s)) for s, n in zip(starts, lengths, strict=False)])


def taken(stream, plan, ahead=False):
    """The numbers of all examples that each worker of the stream takes in the steps of `plan`."""
    return [np.concatenate([b["number"] for b in own]) for own in zip(*batches(stream, plan, ahead), strict=True)]


# --- the streams ------------------------------------------------------------------------------------------------------


@st.composite
def courses(draw):
    """Lengths of shards, and sizes of every step, each at most as large as its shard."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    step = st.tuples(*(st.integers(1, n) for n in lengths))
    return tuple(lengths), draw(st.lists(step, min_size=1, max_size=15)), draw(st.integers(-5, 5)), draw(st.booleans())


@settings(max_examples=40)
@given(courses())
def test_every_example_of_a_shard_occurs_once_per_epoch_under_any_resizes(course):
    lengths, plan, seed, ahead = course
    stream = Stream(shards_of(lengths), seed=seed, workers=range(len(lengths)))
    seen = taken(stream, plan, ahead)
    stream.close()
    assert stream.cursors == tuple(map(sum, zip(*plan, strict=True)))
    assert sum(stream.cursors) == sum(map(sum, plan))
    starts = np.cumsum([0, *lengths])
    for worker, numbers in enumerate(seen):
        n, own = lengths[worker], set(range(starts[worker], starts[worker + 1]))
        epochs = [numbers[k : k + n].tolist() for k in range(0, len(numbers), n)]
        for epoch in epochs[:-1]:
            assert set(epoch) == own
        assert set(epochs[-1]) <= own
        assert len(set(epochs[-1])) == len(epochs[-1])


def test_a_process_reads_the_shards_of_its_own_workers_only():
    sources = [Source(4, first) for first in (0, 4, 8)]
    shards = ad.Shards(sources)
    stream = Stream(shards, seed=0, workers=range(1, 3))
    share = stream.take((2, 3, 4))
    stream.close()
    assert share.offsets == (2, 5)
    assert [len(source.read) for source in sources] == [1, 1 + 3, 1 + 4]  # the first example of each was looked at
    assert [len(batch["number"]) for batch in share.batches] == [3, 4]


# --- as one data set --------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(st.integers(0, sum(LENGTHS) - 1), min_size=1, max_size=30))
def test_shards_are_numbered_end_to_end(numbers):
    for shards in (shards_of(), ad.Shards([Source(7), Source(12, 7), Source(5, 19)])):
        rows = shards.rows(np.sort(numbers))
        assert rows["number"].tolist() == sorted(numbers)
        assert rows["row"][:, 1].tolist() == [-n for n in sorted(numbers)]


@pytest.mark.parametrize(
    ("data_sets", "complaint"),
    [
        ([], "one data set per worker; got none"),
        (numbered(4), "a list of data sets, one per worker; got a dict"),
        ([numbered(4), numbered(0)], r"shard 1: the data set is empty: data\['number'\] has shape \(0,\)"),
        ([numbered(4), Source(0)], r"shard 1: the data set is empty: len\(data\) is 0"),
        ([np.zeros(3), {"x": np.zeros(3)}], "shard 1 has the structure .* shard 0 has "),
        ([np.zeros((3, 2)), np.zeros((3, 5))], r"example of shard 1 is float32\[5\], of shard 0 float32\[2\]"),
    ],
)
def test_invalid_shards_are_refused(data_sets, complaint):
    with pytest.raises(ad.DataError, match=complaint):
        ad.Shards(data_sets)


# --- in a program -----------------------------------------------------------------------------------------------------


def rows_of_each(state, batch):
    """The largest number that each worker has seen, and the mean over all examples."""
    extremes = comm.all_gather(jnp.stack([batch["number"].min(), batch["number"].max()]))
    mean = comm.all_reduce(batch["row"][:, 0].mean())
    return state + 1, {"extremes": extremes, "mean": mean}


def program_on(data, global_batch=12, workers=3, **options) -> ad.Program:
    world = LocalWorld(workers)
    return ad.Program(rows_of_each, jnp.zeros(()), data, global_batch=global_batch, world=world, **options)


def test_each_worker_sees_its_own_shard():
    ends = np.cumsum([0, *LENGTHS])
    with program_on(shards_of(), shares=(2, 6, 4)) as program:
        for _ in range(6):
            expected = program._parts.stream.peek(program.batch_sizes)["number"].mean()
            report = program.step()
            for worker, (low, high) in enumerate(report.metrics["extremes"]):
                assert ends[worker] <= low <= high < ends[worker + 1]
            assert float(report.metrics["mean"]) == pytest.approx(expected)


def test_epochs_count_examples_of_all_workers():
    with program_on(shards_of(), shares=(1, 9, 2)) as program:
        reports = list(program.run(epochs=2))
    assert [r.examples for r in reports] == [12, 24, 36, 48]
    assert [r.epoch for r in reports] == [0, 1, 1, 2]


def test_no_worker_gets_a_batch_larger_than_its_shard():
    with program_on(shards_of(), 20) as program:
        assert program.batch_sizes == (7, 8, 5)
        program.rescale(shares=(1, 1, 20))
        program.warm_up()
        program.step()
        assert program.batch_sizes == (7, 8, 5)
    with program_on(shards_of(), 12, max_local_batch=6) as program:
        program.rescale(global_batch=17)
        assert program._parts.sizes.target == (6, 6, 5)
    with pytest.raises(ad.BatchSizeError, match="larger than the data set, which has 24 examples"):
        program_on(shards_of(), 25)


def test_there_must_be_a_shard_for_each_worker():
    with pytest.raises(ad.DataError, match="Shards of 3 data sets for 2 workers"):
        program_on(shards_of(), workers=2)


def numbers_of(reports) -> list[list[list[int]]]:
    return [np.asarray(r.metrics["extremes"]).tolist() for r in reports]


def test_a_checkpoint_keeps_every_cursor():
    with program_on(shards_of(), shares=(2, 6, 4)) as program:
        list(program.run(steps=4))
        checkpoint = jax.tree.map(np.asarray, program.checkpoint())
        expected = numbers_of(program.run(steps=4))
    assert np.array(checkpoint["cursor"]).tolist() == [8, 24, 16]
    with program_on(shards_of()) as program:
        program.restore(checkpoint)
        assert program.batch_sizes == (2, 6, 4)
        assert program.epoch == 2
        assert numbers_of(program.run(steps=4)) == expected


def test_a_checkpoint_of_other_shards_is_refused():
    with program_on(shards_of()) as program:
        of_three = program.checkpoint()
    assert np.array(of_three["examples"]).tolist() == list(LENGTHS)
    with program_on(shards_of((9, 9)), workers=2) as program:
        program.step()
        with pytest.raises(ad.CheckpointError, match=r"made on \d+ \+ \d+ \+ \d+ examples; this program has 9 \+ 9,"):
            program.restore(of_three)
        assert program.steps == 1
        of_two = program.checkpoint()
    with (
        program_on(numbered(18), workers=2) as program,
        pytest.raises(ad.CheckpointError, match=r"made on 9 \+ 9 examples; this program has 18,"),
    ):
        program.restore(of_two)


def test_shards_are_evaluated_as_one_data_set():
    def mean(state, batch):
        return batch["row"][:, 0].mean()

    with program_on(shards_of()) as program:
        assert float(program.evaluate(mean, shards_of(), batch=5)) == pytest.approx(np.arange(24).mean())
        assert float(program.evaluate(mean, shards_of((3, 9)), batch=5)) == pytest.approx(np.arange(12).mean())
