"""Every example once per epoch, in an order that neither resizing nor the number of workers changes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextvars import ContextVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adaptive as ad
from adaptive.data.example import Functions
from adaptive.data.rows import SourceRows, rows_of
from adaptive.data.stream import Stream
from tests.speed import limit

from .streams import Source, batches, numbered


@pytest.fixture
def stream_of():
    streams = []

    def make(data, seed=0, workers=range(1)):
        streams.append(Stream(rows_of(data), seed=seed, workers=workers))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


def everything(stream, plan, ahead=False):
    """The numbers of the examples of each step, worker by worker."""
    return np.concatenate([b["number"] for step in batches(stream, plan, ahead) for b in step if b is not None])


# --- the stream -------------------------------------------------------------------------------------------------------


@st.composite
def courses(draw):
    """A data set, and the sizes of all workers in each step, resized as anybody likes."""
    n, workers = draw(st.integers(3, 40)), draw(st.integers(1, 4))
    step = st.lists(st.integers(1, n), min_size=workers, max_size=workers).map(tuple)
    return n, draw(st.lists(step, min_size=1, max_size=12)), draw(st.integers(-5, 5)), draw(st.booleans())


@settings(max_examples=50)
@given(courses())
def test_every_example_occurs_once_per_epoch_under_any_resizes(course):
    n, plan, seed, ahead = course
    stream = Stream(rows_of(numbered(n)), seed=seed, workers=range(len(plan[0])))
    seen = everything(stream, plan, ahead)
    stream.close()
    assert sum(stream.cursors) == len(seen) == sum(map(sum, plan))
    for epoch in range(0, len(seen), n):
        part = seen[epoch : epoch + n]
        assert len(set(part.tolist())) == len(part)
    for k in range(1, len(seen) // n):
        assert sorted(seen[:n].tolist()) == sorted(seen[k * n : (k + 1) * n].tolist()) == list(range(n))


@settings(max_examples=40)
@given(courses(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_neither_the_split_nor_the_number_of_workers_changes_the_order(course, workers, random):
    n, plan, seed, ahead = course
    totals = [sum(sizes) for sizes in plan]
    workers = min(workers, *totals)
    other = []
    for total in totals:  # the same global batches, split at random over another number of workers
        cuts = sorted(random.sample(range(1, total), workers - 1))
        other.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)))
    streams = [
        Stream(rows_of(data), seed=seed, workers=range(w))
        for data, w in ((numbered(n), len(plan[0])), (Source(n), workers))
    ]
    one, two = everything(streams[0], plan, ahead), everything(streams[1], other)
    assert one.tolist() == two.tolist()
    for stream in streams:
        stream.close()


def test_a_process_fetches_the_batches_of_its_own_workers_only(stream_of):
    whole, share = (stream_of(Source(20), workers=workers).take((3, 4, 5, 6)) for workers in (range(4), range(2, 4)))
    assert share.offsets == (7, 12)
    assert [b["number"].tolist() for b in share.batches] == [b["number"].tolist() for b in whole.batches[2:]]


@pytest.mark.parametrize("mine", [range(2, 4), range(1, 2), range(4)], ids=["two", "one", "all"])
@pytest.mark.parametrize("beside", [True, False])
def test_rows_in_memory_are_the_same_taken_beside_and_on_demand(beside, mine):
    stream = Stream(rows_of(numbered(11)), seed=3, workers=mine, beside=beside)
    at = 0
    for sizes in [(3, 1, 2, 4)] * 3 + [(2, 0, 3, 0)] * 2 + [(0, 2, 0, 1), (5, 5, 5, 5)]:
        share = stream.take(sizes)
        stream.prefetch(sizes)
        offsets = np.cumsum([0, *sizes])
        assert share.sizes == sizes
        assert list(share.offsets) == [offsets[worker] for worker in mine]
        for worker, batch in zip(mine, share.batches, strict=True):
            expected = stream.indices(at + offsets[worker], sizes[worker])
            assert ([] if batch is None else batch["number"].tolist()) == expected.tolist()
            assert (batch is None) == (not sizes[worker])
        stream.advance(sizes)
        at += sum(sizes)
        assert stream.cursors == (at,)
    stream.close()


def test_any_part_of_the_next_global_batch_can_be_read(stream_of):
    for data in (numbered(9), Source(9)):
        stream = stream_of(data, workers=range(2))
        next(batches(stream, [(3, 4)], ahead=False))
        assert stream.peek((2, 3))["number"].tolist() == stream.indices(7, 5).tolist()
        assert (stream.cursors, stream.epochs, stream.epoch) == ((7,), 7 / 9, 0)


# --- fetching ahead ---------------------------------------------------------------------------------------------------


def test_prefetched_examples_are_used(stream_of):
    data = Source(12)
    stream = stream_of(data)
    stream.take((4,))
    stream.prefetch((4,))
    stream._ahead[2]()
    data.broken = set(range(12))
    stream.advance((4,))
    assert len(stream.take((4,)).batches[0]["number"]) == 4


@pytest.mark.parametrize(("sizes", "moved"), [((3,), 4), ((4,), 0), ((4,), 3)])
def test_unused_prefetched_examples_are_dropped(stream_of, sizes, moved):
    stream = stream_of(numbered(12))
    stream.take((4,))
    stream.prefetch((4,))
    stream.advance((moved,))
    (batch,) = stream.take(sizes).batches
    assert batch["number"].tolist() == stream.indices(moved, sizes[0]).tolist()
    assert stream._ahead is None


def test_a_source_is_read_in_one_thread(stream_of):
    data = Source(30)
    everything(stream_of(data), [(4,)] * 6, ahead=True)
    assert len(data.threads) == 1  # example 0 was looked at when the stream was made
    assert threading.get_ident() not in data.threads


LENGTH = ContextVar("LENGTH", default=1.0)


def test_a_source_is_read_in_the_surroundings_in_which_the_stream_was_made(stream_of):
    class Scaled:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"x": np.float32(LENGTH.get())}

    token = LENGTH.set(3.0)
    stream = stream_of(Scaled())
    LENGTH.reset(token)
    assert stream.take((4,)).batches[0]["x"].tolist() == [3.0] * 4


def test_an_error_of_the_source_is_raised_by_the_step_that_needs_the_example(stream_of):
    data = Source(12)
    stream = stream_of(data)
    data.broken = set(stream.indices(4, 4).tolist())
    list(batches(stream, [(4,)]))
    for _ in range(2):  # nothing has moved, so it is tried again
        with pytest.raises(OSError, match="cannot be read"):
            stream.take((4,))
    assert sum(stream.cursors) == 4
    data.broken = set()
    assert stream.take((4,)).batches[0]["number"].tolist() == stream.indices(4, 4).tolist()


class Read(SourceRows):
    """Data as if two threads read them; notes which examples they are asked for, and which reads are canceled."""

    def __init__(self, examples, piece):
        super().__init__(Source(examples), Functions(), 0, 1, None)
        self.readers.number, self.asked, self.reads, self.piece = 2, [], [], lambda examples: min(piece, examples)

    def submit(self, indices, *others):
        self.asked += indices.tolist()
        read = Read.Future()
        try:
            read.set_result(self._reader.read(indices, *others))
        except OSError as error:
            read.set_exception(error)
        self.reads.append(read)
        return read

    class Future(Future):
        canceled = False

        def cancel(self):
            self.canceled = True


@pytest.mark.parametrize(("piece", "ahead"), [(1, 16), (3, 16), (100, 36)])
def test_readers_read_each_example_once_whatever_the_sizes(piece, ahead):
    data = Read(200, piece)
    stream = Stream(data, seed=0, workers=range(2))
    plan = [(4, 4), (3, 2), (1, 1), (2, 0), (6, 5), (4, 4)]
    seen = everything(stream, plan).tolist()
    assert seen == stream.indices(0, len(seen)).tolist()
    assert len(data.asked) == len(set(data.asked)), "an example was read twice"
    assert len(data.asked) - len(seen) == ahead  # two steps, or two reads for each reader
    assert not any(read.canceled for read in data.reads[-4:])
    stream.close()


def test_readers_forget_what_no_step_needs():
    data = Read(5000, 10)
    stream = Stream(data, seed=0, workers=range(1))
    stream.take((100,))
    first = list(data.reads)
    stream.go_on((1000,), "")  # a restore
    stream.take((100,))
    assert all(read.canceled for read in first)
    assert not any(read.canceled for read in data.reads[len(first) :])
    for _ in range(30):
        stream.advance((100,))
        stream.take((100,))
    assert len(stream._examples._kept) <= 3 * 100, "examples of earlier steps are kept"
    stream.close()


# --- data sets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, r"data\['x'\].: 3, .data\['y'\].: 4"),
        ({"x": np.zeros((0, 2))}, r"empty: data\['x'\] has shape \(0, 2\)"),
        (Source(0), "empty"),
        ({"x": np.array([1, 2], "M8[s]")}, r"data\['x'\] holds times"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused_by_the_leaf(data, wrong):
    with pytest.raises(ad.DataError, match=wrong):
        rows_of(data)


def test_functions_get_copies_of_rows_by_position():
    def doubled(example):
        example["x"] *= 2
        return example

    pandas = pytest.importorskip("pandas")
    x, column = np.arange(8.0).reshape(4, 2), pandas.Series([0, 1, 2, 3], index=[3, 1, 0, 2])
    data = ad.data.from_source({"x": x, "i": column}, map=doubled)
    for _ in range(2):
        rows = data.rows(np.arange(4))
        assert rows["x"].tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]
        assert rows["i"].tolist() == [0, 1, 2, 3]


class Ragged:
    def __init__(self, odd):
        self.odd = odd

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.odd if index == 3 else {"x": np.zeros(2)}


@pytest.mark.parametrize(
    ("odd", "wrong"),
    [
        ({"x": np.zeros(3)}, r"example\['x'\] of example 3 is float32\[3\], of example 0 float32\[2\]"),
        ({"x": np.zeros(2), "y": 1}, "example 3 has the structure"),
        ({"x": np.zeros(2, int)}, r"example\['x'\] of example 3 is int32\[2\], of example 0 float32\[2\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_their_number(stream_of, odd, wrong):
    with pytest.raises(ad.DataError, match=wrong):
        stream_of(Ragged(odd)).take((6,))


def test_a_stream_goes_back_to_earlier_cursors(stream_of):
    for data in (numbered(9), Source(9)):
        stream = stream_of(data)
        assert stream.goes_back
        before, first = stream.cursors, stream.take((4,)).batches
        stream.prefetch((4,))
        stream.advance((4,))
        stream.take((4,))
        stream.go_back(before)
        again = stream.take((4,)).batches
        assert again[0]["number"].tolist() == first[0]["number"].tolist()


def test_a_restore_to_the_position_that_is_being_read_reads_it_anew(stream_of):
    class Held(Source):
        gate = threading.Event()

        def __getitem__(self, index):
            assert self.gate.wait(limit(30))
            return super().__getitem__(index)

    Held.gate.set()  # the first example is looked at
    stream = stream_of(ad.data.from_source(Held(200), num_threads=2))
    Held.gate.clear()
    stream.prefetch((4,))
    stream.go_on((4,), stream.place())  # cancels the reads that have not begun
    Held.gate.set()
    assert stream.take((4,)).batches[0]["number"].tolist() == stream.indices(4, 4).tolist()
