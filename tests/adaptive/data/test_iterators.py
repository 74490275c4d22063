"""Data without an index: each example once per pass, whatever is resized, and from where a checkpoint stood."""

from __future__ import annotations

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adaptive as ad
import collectives as comm
from adaptive.data.iterators import IterableData
from adaptive.data.same_data import digests_of_data
from adaptive.data.stream import Stream, open_data

from .streams import batches

grain = pytest.importorskip("grain")


def counted(n):
    """Numbers 0 … n-1, in each epoch."""

    def rows(epoch):
        for i in range(n):
            yield {"i": i, "epoch": epoch}

    return rows


def opened(how, workers=1, mine=None, seed=0):
    mine = range(workers) if mine is None else mine
    return Stream(open_data(how, workers, mine), seed=seed, workers=mine)


def walk(stream, plan):
    """The batches of this process's workers, step by step, fetched ahead."""
    for step in batches(stream, plan):
        yield [None if b is None else b["i"].tolist() for b in step]


def flat(steps):
    return [i for step in steps for batch in step if batch for i in batch]


# --- an iterator that all share ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.integers(1, 30),
    st.lists(st.tuples(*[st.integers(0, 7)] * 3).filter(any), min_size=1, max_size=8),
)
def test_each_example_is_used_once_per_pass_under_any_resizes(n, plan):
    how = ad.data.from_iterator(counted(n))
    streams = [opened(how, 3, range(k, k + 1)) for k in range(3)]
    epochs = []
    steps = [list(walk(stream, plan)) for stream in streams]
    together = [i for step in zip(*steps, strict=True) for own in step for i in own[0] or ()]
    consumed = sum(map(sum, plan))
    assert together == [i % n for i in range(consumed)]
    for stream in streams:
        epochs.append((stream.epoch, stream.epoch_length))
        stream.close()
    assert set(epochs) == {(consumed // n, n if consumed >= n else None)}


def test_a_step_that_is_taken_again_takes_the_same_examples():
    stream = opened(ad.data.from_iterator(counted(100)), 2)
    for _ in walk(stream, [(3, 3)]):
        pass
    again = [flat([[b["i"].tolist() for b in stream.take(sizes).batches]]) for sizes in ((3, 3), (5, 1), (3, 3))]
    assert again == [list(range(6, 12))] * 3
    stream.close()


def test_epochs_are_fractions_as_soon_as_one_has_ended_and_begin_with_their_first_example():
    stream = opened(ad.data.from_iterator(counted(8)))
    assert [stream.epochs for _ in walk(stream, [(4,)] * 6)] == [0, 1, 1.5, 2, 2.5, 3]
    stream.close()
    begun, seen = [], []
    stream = opened(ad.data.from_iterator(lambda epoch: begun.append(epoch) or counted(8)(epoch), length=8))
    for _ in range(2):
        stream.take((4,))
        stream.advance((4,))
        seen.append((stream.epochs, stream.epoch_length, len(begun)))
    assert seen == [(0.5, 8, 1), (1, 8, 1)]
    stream.close()


def test_make_is_called_with_the_arguments_that_it_accepts():
    def rows(epoch, workers, extra=3):
        yield from ({"i": 100 * epoch + 10 * workers + extra} for _ in range(2))

    assert flat(walk(opened(ad.data.from_iterator(rows), 1), [(4,)])) == [13, 13, 113, 113]
    assert flat(walk(opened(ad.data.from_iterator(lambda: [{"i": 4}, {"i": 5}])), [(3,)])) == [4, 5, 4]


def test_only_the_share_of_this_process_is_transformed():
    seen = []

    def augment(example, rng):
        seen.append(example["i"])
        return {**example, "r": rng.random()}

    how = ad.data.from_iterator(counted(20), map=lambda e: {"i": e["i"] + 100}, random_map=augment)
    stream = opened(how, 2, range(1, 2))
    seen.clear()
    (batch,) = stream.take((4, 3)).batches
    assert seen == batch["i"].tolist() == [104, 105, 106]
    other = opened(how, 1).take((7,)).batches[0]
    assert other["r"][4:].tolist() == batch["r"].tolist()
    stream.close()


def test_a_function_that_changes_examples_in_place_is_called_once_for_each():
    def doubled(example):
        example["i"] *= 2
        return example

    data = open_data(ad.data.from_iterator(counted(9), map=doubled), 1, range(1))
    digests_of_data(data)
    stream = Stream(data, seed=0, workers=range(1))
    for batch in (stream.peek((6,)), *stream.take((6,)).batches, *stream.take((9,)).batches):
        assert batch["i"].tolist() == [2 * i for i in range(len(batch["i"]))]
    stream.close()


# --- what is refused, and what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (iter([1]), {}, "a list_iterator can be iterated over only once"),
        (3, {}, "from_iterator takes a function that returns an iterator; got a int"),
        ([{"i": 1}], {}, "A list may be examples or columns"),
        (counted(3), {"length": 2.5}, "length=2.5: write the number of examples"),
    ],
)
def test_a_function_that_returns_no_iterator_is_refused(make, options, says):
    with pytest.raises(ad.DataError) as error:
        ad.data.from_iterator(make, **options)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("how", "plan", "says"),
    [
        (ad.data.from_iterator(list), [], "the iterator of epoch 0 gave no examples."),
        (ad.data.from_iterator(lambda: [{}]), [], "has no arrays"),
        (
            ad.data.from_iterator(lambda epoch: [{"i": 1}] * (epoch < 1)),
            [(1,), (1,)],
            "does it return the same iterator",
        ),
        (ad.data.from_iterator(counted(5), length=7), [(6,)], "ended after 5 examples; length= says 7"),
        (
            ad.data.from_iterator(lambda: [{"i": 1}, {"i": 1.5}]),
            [(2,)],
            "of example 1 is float32[], of example 0 int32[]",
        ),
        (ad.data.from_iterator(lambda: [{"i": [1.0, 2.0]}]), [], "example 0['i'] is a list of numbers"),
    ],
)
def test_the_step_that_reads_a_wrong_item_raises(how, plan, says):
    with pytest.raises(ad.DataError) as error:
        flat(walk(opened(how), plan))
    assert says in str(error.value)


def test_an_iterator_that_raises_has_not_ended():
    def rows():
        yield {"i": 0}
        yield {"i": 1}
        raise OSError("the server is gone")

    stream = opened(ad.data.from_iterator(rows))
    assert flat(walk(stream, [(2,)])) == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="the server is gone") as error:
            stream.take((2,))
    assert error.value.__notes__ == ["raised by the iterator at example 2"]
    assert stream.epoch == 0
    stream.close()


# --- an iterator for each worker --------------------------------------------------------------------------------------


def own(worker, workers, epoch):
    for i in itertools.count():
        yield {"i": 1000 * worker + i}


def test_each_worker_goes_through_its_own():
    stream = opened(ad.data.from_iterator(own), 3, range(1, 3))
    assert list(walk(stream, [(2, 2, 1), (0, 0, 3), (1, 1, 1)])) == [
        [[1000, 1001], [2000]],
        [None, [2001, 2002, 2003]],
        [[1002], [2004]],
    ]
    with pytest.raises(ad.DataError, match="Pass a batch to check"):
        stream.peek((1, 1, 1))
    assert stream.cursors == (3, 3, 5)
    assert stream.epoch_length is None
    stream.go_on((9, 5, 2), stream.place())
    assert list(walk(stream, [(1, 1, 1)])) == [[[1005], [2002]]]
    stream.close()


# --- going on ---------------------------------------------------------------------------------------------------------


class Stateful:
    """As grain's iterators: gives numbers, and can be set to where another one was."""

    skipped = 0

    def __init__(self, n, encode):
        self.at, self.n, self.encode = 0, n, encode

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        Stateful.skipped += 1
        return {"i": self.at - 1}

    def get_state(self):
        return self.encode(self.at)

    def set_state(self, state):
        self.at = int(state) if isinstance(state, bytes) else state["at"]


class Refusing(Stateful):
    """One of another version: it refuses the state after it has moved."""

    def set_state(self, state):
        self.at = 3
        raise ValueError("a state of another version")


GRAIN = grain.MapDataset.range(10).map(lambda i: {"i": i})
KINDS = {
    "skipped": lambda: counted(10),
    "dict": lambda: lambda: Stateful(10, lambda at: {"at": np.int64(at)}),
    "refused": lambda: lambda: Refusing(10, lambda at: {"at": at}),
    "grain, shuffled": lambda: (
        lambda: grain.experimental.WindowShuffleIterDataset(GRAIN.to_iter_dataset(), window_size=4, seed=1)
    ),
}


@pytest.mark.parametrize(("kind", "steps"), [("dict", 1), *((kind, 5) for kind in KINDS)])
def test_a_stream_continues_at_the_position_of_another(kind, steps):
    make, plan = KINDS[kind], [(2, 1), (1, 3), (3, 0), (4, 4), (1, 1), (5, 5), (2, 2), (3, 3)]
    stream = opened(ad.data.from_iterator(make()), 2)
    whole = flat(walk(stream, plan))
    assert all(sorted(whole[k : k + 10]) == list(range(10)) for k in range(0, len(whole) - 9, 10))
    epochs = stream.epochs
    stream.close()
    first, other = opened(ad.data.from_iterator(make()), 2), opened(ad.data.from_iterator(make()), 2)
    begun = flat(walk(first, plan[:steps]))
    other.go_on(first.cursors, first.place())
    assert other.epoch == first.epoch
    assert begun + flat(walk(other, plan[steps:])) == whole
    assert other.epoch == int(epochs)
    for each in (first, other):
        each.close()


def test_an_iterator_with_a_state_is_not_replayed():
    stream = opened(ad.data.from_iterator(lambda: Stateful(10**6, lambda at: {"at": at})))
    for _ in walk(stream, [(10,)] * 20):
        pass
    other = opened(ad.data.from_iterator(lambda: Stateful(10**6, lambda at: {"at": at})))
    Stateful.skipped = 0
    other.go_on(stream.cursors, stream.place())
    assert Stateful.skipped <= 22
    assert json.loads(stream.place())[0] > 150
    assert flat(walk(other, [(3,)])) == [200, 201, 202]
    stream.close()
    other.close()


# --- programs ---------------------------------------------------------------------------------------------------------


def driver(state, batch):
    x = batch["i"].astype(jnp.float32)
    return state + comm.all_reduce(x.mean()), {"mean": comm.all_reduce(x.mean())}


def program_on(data, **options):
    return ad.Program(driver, jnp.zeros(()), data, resizable=False, **{"global_batch": 4, **options})


def test_a_program_goes_through_epochs_and_on_from_a_checkpoint():
    with program_on(ad.data.from_iterator(counted(10))) as program:
        assert "every process reads all examples" in program.explain()
        assert "one example is example['epoch'] int32[], example['i'] int32[]" in program.explain()
        assert program.check()
        reports = [program.step() for _ in range(3)]
        kept = program.checkpoint()
        reports += list(program.run(epochs=1))
        assert [report.epoch for report in reports] == [0, 0, 1, 1, 2]
        means = [float(report.metrics["mean"]) for report in reports]
        assert means == [np.mean([i % 10 for i in range(k, k + 4)]) for k in range(0, 20, 4)]
    with program_on(ad.data.from_iterator(counted(10))) as program:
        program.restore(kept)
        assert [float(report.metrics["mean"]) for report in program.run(epochs=1)] == means[3:]


def test_an_iterators_state_is_saved_on_disk(tmp_path):
    data = ad.data.from_iterator(lambda: iter(GRAIN.to_iter_dataset()))
    with program_on(data) as program:
        list(program.run(steps=7, checkpoint=ad.Checkpoints(tmp_path, every=3)))
    with program_on(data) as program:
        program.restore(tmp_path)
        assert program.steps == 7
        assert float(program.step().metrics["mean"]) == np.mean([i % 10 for i in range(28, 32)])


def test_epochs_of_data_of_unknown_length_are_refused(tmp_path):
    with program_on(ad.data.from_iterator(own)) as program:
        with pytest.raises(ad.DataError, match=r"lengths of all are not known\. Write steps=…"):
            next(program.run(epochs=1))
        with pytest.raises(ad.DataError, match="Write every=\"100 steps\" for every='1 epoch'"):
            next(program.run(steps=1, checkpoint=ad.Checkpoints(tmp_path, every="1 epoch")))
        assert [report.epoch for report in program.run(steps=3)] == [0, 0, 0]


def test_data_without_an_index_are_not_evaluated():
    with program_on(ad.data.from_iterator(counted(10))) as program, pytest.raises(ad.DataError, match="have no index"):
        program.evaluate(lambda state, batch: batch["i"].mean(), ad.data.from_iterator(counted(10)))
    with pytest.raises(ad.DataError, match=r"shard 0: data is a .*ad.data.from_iterator"):
        ad.Shards([grain.MapDataset.range(3).to_iter_dataset()])
    with pytest.raises(ad.DataError, match=r"ad\.data\.from_iterator"):
        ad.data.from_source(grain.MapDataset.range(3).to_iter_dataset())


# --- the same on all processes ----------------------------------------------------------------------------------------


def test_the_first_examples_are_compared_and_taken_all_the_same():
    def odd(epoch):
        for i in range(20):
            yield {"i": i + (i == 7), "epoch": epoch}

    digests = [
        digests_of_data(IterableData(ad.data.from_iterator(rows), 1, [0])) for rows in (counted(20), counted(20), odd)
    ]
    assert digests[0] == digests[1]
    assert [name for name in digests[0] if digests[0][name] != digests[2][name]] == ["data['i']"]
    data = open_data(ad.data.from_iterator(counted(20)), 1, range(1))
    digests_of_data(data)
    stream = Stream(data, seed=0, workers=range(1))
    assert flat(walk(stream, [(20,)])) == list(range(20))
    stream.close()
    own_data = [IterableData(ad.data.from_iterator(own), 2, [k]) for k in range(2)]
    assert digests_of_data(own_data[0]) == digests_of_data(own_data[1])
