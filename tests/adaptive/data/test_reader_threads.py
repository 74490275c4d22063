"""Reading in several threads: where it waits, never where threads would disturb each other, with the same examples."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sqlite3
import sys
import threading
import time
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data import reader_threads
from adaptive.data.isolated_copies import CannotCopyError, SourceCopies
from adaptive.data.reading import ExampleReader, Passes
from tests.speed import limit

COVERS = ("adaptive/data/isolated_copies.py", "adaptive/data/shared_state.py")

WAIT = 2e-3
ROWS = 64


@pytest.fixture(autouse=True)
def however_busy_the_machine_is(monkeypatch):
    monkeypatch.setattr(reader_threads, "_FASTER", float("inf"))
    yield
    while OPENED.files:
        OPENED.files.pop().close()


class Opened(threading.local):
    """Files to be closed. The threads have the list in common."""

    files: list = []  # noqa: RUF012


OPENED = Opened()


def opened(path):
    OPENED.files.append(open(path, "rb"))  # noqa: SIM115
    return OPENED.files[-1]


class Waits:
    """Returns the thread and the copy of this object that read an example."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        time.sleep(WAIT)
        return {"i": np.int32(index)}


class Watched(Waits):
    """Records the readers, by thread and object; all copies share the record."""

    def __init__(self, record):
        self.record = record

    def __getitem__(self, index):
        self.record.reads.append((threading.get_ident(), id(self), int(index)))
        return super().__getitem__(index)


class Record(threading.local):
    """The reads by reader. Copies of a source share it, like all locks of a library."""

    def __init__(self, reads):
        self.reads = reads


def reading(source, transform=None, augment=None):
    made = ExampleReader(source, transform, augment)
    made.first()
    return made


def rows(made, numbers, passes=None):
    return made.rows(np.asarray(numbers), passes or Passes())


def several(made):
    return made._threads._several


def begin(made, batch=16):
    """Read until it is decided how to read."""
    for start in range(0, 32, batch):
        found = rows(made, range(start, start + batch))
        assert found["i"].tolist() == list(range(start, start + batch))
    assert made._threads._decided
    return made


# --- by how many ------------------------------------------------------------------------------------------------------


def test_a_source_that_waits_is_read_by_several_threads_each_with_its_copy():
    kept = Record([])
    made = begin(reading(Watched(kept)))
    assert several(made)
    kept.reads.clear()
    assert rows(made, range(20, 52))["i"].tolist() == list(range(20, 52))
    threads, objects, numbers = (set(column) for column in zip(*kept.reads, strict=True))
    assert 1 < len(threads) == len(objects) <= reader_threads.MOST_THREADS
    assert sorted(i for *_, i in kept.reads) == list(range(20, 52))
    assert len(numbers) == 32
    made.close()


def test_no_more_threads_are_used_than_there_are_examples():
    kept = Record([])
    made = begin(reading(Watched(kept)))
    made.close()
    kept.reads.clear()
    before = threading.active_count()
    rows(made, [3, 4, 5])
    assert threading.active_count() <= before + 2
    rows(made, [3])
    made.close()


def test_threads_end_when_they_are_not_needed():
    made = begin(reading(Waits()))
    assert any(thread.name.startswith("adaptive-input-") for thread in threading.enumerate())
    threads = [thread._thread for thread, _ in made._threads._others]
    made.close()
    for thread in threads:
        thread.join(limit(20))
        assert not thread.is_alive()
    assert rows(made, [1, 2])["i"].tolist() == [1, 2]  # and are started again
    made.close()


class Computes(Waits):
    def __getitem__(self, index):
        for _ in range(3000):
            index += 0
        return {"i": np.int32(index)}


def test_a_source_that_computes_is_read_by_one_thread():
    made = begin(reading(Computes()))
    assert not several(made)
    assert not made.note
    assert not made._threads._others


class AtOnce(Waits):
    def __getitems__(self, indices):
        time.sleep(WAIT)
        return [{"i": np.int32(index)} for index in indices]


def test_a_source_that_reads_many_at_once_does_so():
    made = reading(AtOnce())
    assert rows(made, range(20))["i"].tolist() == list(range(20))
    assert made._threads is None


class TooFew(AtOnce):
    def __getitems__(self, indices):
        return [{"i": np.int32(index)} for index in indices][:-1] if len(indices) > 1 else [{"i": np.int32(0)}]


def test_missing_examples_of_a_batched_read_are_named():
    with pytest.raises(ad.DataError, match="__getitems__ gave 2 examples for 3 numbers"):
        rows(reading(TooFew()), range(3))


# --- what they read ---------------------------------------------------------------------------------------------------


def noise(example, rng):
    return {**example, "r": rng.random()}


def test_random_numbers_are_those_of_the_example():
    made, alone = begin(reading(Waits(), None, noise)), reading(Waits(), None, noise)
    passes = Passes(np.arange(32) % 3, seed=7)
    assert several(made)
    found, like = rows(made, range(32), passes), rows(alone, range(32), passes)
    assert not several(alone) or alone is not made
    assert found["r"].tolist() == like["r"].tolist()
    made.close()


class Breaks(Waits):
    def __getitem__(self, index):
        if index >= 40:
            raise OSError(f"no file {index}")
        return super().__getitem__(index)


def test_the_first_failing_example_is_named():
    made = begin(reading(Breaks()))
    assert several(made)
    for _ in range(5):
        with pytest.raises(OSError, match="no file 41") as error:
            rows(made, [1, 2, 3, 41, 42, 43, 44, 4, 45])
        assert error.value.__notes__ == ["in reading example 41 of the data"]
    assert rows(made, [5, 6])["i"].tolist() == [5, 6]
    made.close()


class Uneven(Waits):
    def __getitem__(self, index):
        time.sleep(WAIT)
        return {"i": np.zeros(2 if index == 41 else 1, np.int32)[0] + index if index != 41 else np.zeros(2, np.int32)}


def test_an_example_of_another_structure_is_named_before_a_failing_one():
    made = begin(reading(Uneven()))
    with pytest.raises(ad.DataError, match="of example 41 has shape"):
        rows(made, [1, 2, 41, 3])
    made.close()


class Wide(Waits):
    def __getitem__(self, index):
        time.sleep(WAIT)
        return {"i": jnp.asarray(np.arange(3, dtype=np.int64) + index).dtype.itemsize + 0 * index + index - 8}


def test_settings_of_jax_hold_in_the_threads():
    with jax.enable_x64(True):
        source = Wide()
        source[0]  # the first conversion by JAX costs more than several waits
        made = begin(reading(source))
        assert several(made)
        assert rows(made, range(4))["i"].dtype == np.int64
        made.close()


class Draws(Waits):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        time.sleep(WAIT)
        return {"i": np.int32(index), "r": self.rng.random()}


def test_data_that_is_not_thread_safe_is_read_by_one_thread():
    made = begin(reading(Draws()))
    assert not several(made)
    assert "have read other examples" in made.note
    assert not made._threads._others


# --- what they must not share -----------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(ROWS, dtype=np.int32).tobytes())
    return path


class OpenFile(Waits):
    """Reads by a place in a file, which threads that share it would take from each other."""

    def __init__(self, path):
        self.file = opened(path)

    def __getitem__(self, index):
        self.file.seek(4 * index)
        time.sleep(WAIT)
        return {"i": np.frombuffer(self.file.read(4), np.int32)[0]}


class OpenedLate(OpenFile):
    def __init__(self, path):
        self.path, self.file = path, None

    def __getitem__(self, index):
        if self.file is None:
            self.file = opened(self.path)
        return super().__getitem__(index)


class NumberOfFile(OpenFile):
    def __init__(self, path):
        self.file = os.open(path, os.O_RDONLY)

    def __getitem__(self, index):
        os.lseek(self.file, 4 * index, os.SEEK_SET)
        time.sleep(WAIT)
        return {"i": np.frombuffer(os.read(self.file, 4), np.int32)[0]}


class Closes(NumberOfFile):
    def __getitem__(self, index):
        time.sleep(WAIT)
        return {"i": np.frombuffer(os.pread(self.file, 4, 4 * index), np.int32)[0]}

    def __del__(self):
        os.close(self.file)


class Locked(Waits):
    def __init__(self):
        self.lock = threading.Lock()


class Database(Waits):
    def __init__(self):
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)


class OfTheClass(OpenFile):
    file = None

    def __init__(self, path):
        OfTheClass.file = opened(path)


class LateOfTheClass(OpenFile):
    file = None

    def __init__(self, path):
        self.path = path

    def __getitem__(self, index):
        if self.file is None:
            type(self).file = opened(self.path)
        return super().__getitem__(index)


GLOBAL = {}


class InAGlobal(OpenFile):
    def __init__(self, path):
        self.path = path

    def __getitem__(self, index):
        self.file = GLOBAL.setdefault("file", None) or GLOBAL.update(file=opened(self.path)) or GLOBAL["file"]
        return super().__getitem__(index)


class Place:
    """Keeps a place, as a file does."""

    def __init__(self):
        self.at = 0

    def seek(self, at):
        self.at = at


PLACE = Place()


def found_at(index):
    PLACE.seek(index)
    time.sleep(WAIT)
    return np.int32(PLACE.at)


class ByAFunction(Waits):
    def __getitem__(self, index):
        return {"i": found_at(index)}


COUNT = 0


class SetsAGlobal(Waits):
    def __getitem__(self, index):
        global COUNT
        COUNT = index
        return super().__getitem__(index)


class InADefault(Waits):
    def __getitem__(self, index, place=Place()):  # noqa: B008
        place.seek(index)
        time.sleep(WAIT)
        return {"i": np.int32(place.at)}


class Scratch(Waits):
    def __init__(self, size):
        self.scratch = np.zeros(size, np.int32)

    def __getitem__(self, index):
        self.scratch.flat[0] = index
        time.sleep(WAIT)
        return {"i": self.scratch.flat[0]}


def keeps_a_place():
    place = Place()

    def transform(example):
        place.seek(int(example["i"]))
        time.sleep(WAIT)
        return {"i": np.int32(place.at)}

    return transform


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (OpenFile, "it cannot be copied: cannot pickle "),
        (lambda path: Locked(), "it cannot be copied: cannot pickle '_thread.lock' object"),
        (lambda path: Database(), "it cannot be copied: cannot pickle 'sqlite3.Connection' object"),
        (NumberOfFile, "NumberOfFile.__getitem__() calls lseek"),
        (Closes, "a Closes has a __del__, which would be called for each copy"),
        (OfTheClass, "OfTheClass.file, which all instances share, is a BufferedReader"),
        (LateOfTheClass, "LateOfTheClass.file, which all instances share, is a BufferedReader"),
        (InAGlobal, "the global variable GLOBAL, which InAGlobal.__getitem__() uses, is a dict"),
        (lambda path: ByAFunction(), "the global variable PLACE, which found_at() uses, is a Place"),
        (lambda path: SetsAGlobal(), "SetsAGlobal.__getitem__() changes the global variable COUNT"),
        (lambda path: InADefault(), "what InADefault.__getitem__() keeps from call to call is a Place"),
        (lambda path: Scratch(5_000_000), "it holds more than 16 MiB that each thread would have a copy of"),
    ],
)
def test_one_thread_reads_data_whose_state_threads_would_share(path, make, why):
    GLOBAL.clear()
    LateOfTheClass.file = None
    source = make(path)
    made = begin(reading(source))
    assert not several(made)
    assert why in made.note
    if isinstance(source, Database):
        source.connection.close()  # Python 3.13 warns of those that are left open
    assert "write num_readers=" in made.note


@pytest.mark.parametrize(
    "make",
    [OpenedLate, lambda path: Scratch(10), lambda path: Scratch((ROWS, 10))],
    ids=["a file that each copy opens", "a buffer", "a buffer of few rows"],
)
def test_state_that_each_copy_has_of_its_own_allows_threads(path, make):
    made = begin(reading(make(path)))
    assert several(made)
    for _ in range(10):
        assert rows(made, range(ROWS))["i"].tolist() == list(range(ROWS))
    made.close()


def test_a_copied_function_has_copies_of_its_closure():
    made = begin(reading(Waits(), keeps_a_place()))
    assert several(made)
    for _ in range(10):
        assert rows(made, range(ROWS))["i"].tolist() == list(range(ROWS))
    made.close()


@functools.lru_cache
def cached(number):
    return number


@pytest.mark.parametrize(
    "transform",
    [
        functools.partial(lambda example, by: {"i": example["i"] * np.int32(by)}, by=1),
        jax.jit(lambda example: {"i": example["i"] + 0}),
        lambda example: json.loads(json.dumps({"i": int(example["i"])})),
        lambda example: {"i": np.int32(cached(int(example["i"])))},
    ],
    ids=["partial", "jit", "a library's function", "cached"],
)
def test_functions_are_no_hindrance(transform):
    made = begin(reading(Waits(), transform))
    assert several(made), made.note
    made.close()


def test_used_names_of_user_modules_are_examined(tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(
        "import io\nFILE = io.BytesIO(bytes(100))\ndef get(i):\n    FILE.seek(i)\n    return FILE.tell()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import users_own

    def imports(example):
        import users_own

        return {"i": np.int32(users_own.get(int(example["i"])))}

    def imports_a_part(example):
        from users_own import get

        return {"i": np.int32(get(int(example["i"])))}

    closes_over = lambda example: {"i": np.int32(users_own.get(int(example["i"])))}  # noqa: E731
    for transform in (imports, imports_a_part, closes_over):
        made = begin(reading(Waits(), transform))
        assert not several(made)
        assert "the global variable FILE, which get() uses, is a BytesIO" in made.note


def test_modules_that_a_function_imports_from_its_own_package_are_examined(tmp_path, monkeypatch):
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "state.py").write_text(
        "import io\n\nFILE = io.BytesIO(bytes(100))\n\ndef get(i):\n    return FILE.seek(i)\n"
    )
    (package / "reading.py").write_text(
        "import numpy as np\n\ndef read(example):\n    from . import state\n"
        "    return {'i': np.int32(state.get(int(example['i'])))}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    users = importlib.import_module("users_package.reading")
    importlib.import_module("users_package.state")
    made = begin(reading(Waits(), users.read))
    assert not several(made)
    assert "the global variable FILE, which get() uses, is a BytesIO" in made.note


def test_libraries_that_are_not_made_for_threads_keep_reading_to_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "netCDF4", types.ModuleType("netCDF4"))
    made = begin(reading(Waits()))
    assert not several(made)
    assert "netCDF4 has been imported, which must not be used by several threads" in made.note


# --- memory -----------------------------------------------------------------------------------------------------------


class Large(Waits):
    def __init__(self, path=None):
        self.names = [f"a rather long name of file number {i}" for i in range(20_000)]
        self.records = [{"name": f"{i}", "box": [i, i + 1], "of": None} for i in range(20_000)]
        self.table = np.zeros((ROWS, 100_000), np.uint8)
        self.constant = np.zeros(10_000_000, np.uint8)
        self.constant.flags.writeable = False
        self.text = "x" * 1_000_000


def test_copies_share_large_arrays():
    source = Large()
    tracemalloc.start()
    try:
        copies = SourceCopies(source, (None, None))
        before, _ = tracemalloc.get_traced_memory()
        made = [copies.make() for _ in range(15)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1_000_000
    for copy, _ in made:
        assert copy is not source
        for name in ("names", "records", "table", "constant", "text"):
            assert getattr(copy, name) is getattr(source, name)


def test_copies_are_made_before_the_first_read(path):
    source = OpenedLate(path)
    copies = SourceCopies(source, (None, None))
    source[3]
    copy, _ = copies.make()
    assert source.file is not None
    assert copy.file is None


def test_caches_filled_by_reads_are_not_shared():
    cache, small = [None] * 5000, {"at": 0}
    source = Cached(cache, small)
    copy, _ = SourceCopies(source, (None, None)).make()
    assert copy.cache is not cache
    assert copy.small is not small


class Cached(Waits):
    def __init__(self, cache, small):
        self.cache, self.small = cache, small


def test_tensors_of_torch_that_all_instances_share_are_data():
    torch = pytest.importorskip("torch")

    class Normalized(Waits):
        mean, dtype, device = torch.zeros(3), torch.float32, torch.device("cpu")
        layer = torch.nn.Identity()

    assert "Normalized.layer, which all instances share, is a Id" in SourceCopies(Normalized(), (None,)).shared()
    del Normalized.layer
    assert SourceCopies(Normalized(), (None,)).shared() == ""


def test_a_closure_that_refers_to_itself_cannot_be_copied():
    def again(example, deep=[]):  # noqa: B006
        return again(example, deep)

    with pytest.raises(CannotCopyError):
        SourceCopies(Waits(), (again,))


# --- in programs ------------------------------------------------------------------------------------------------------


def driver(state, batch):
    return state + comm.all_reduce(batch["i"].astype(jnp.float32).sum()), {}


def test_a_program_says_why_one_thread_reads(path):
    with ad.Program(driver, jnp.zeros(()), OpenFile(path), global_batch=16, resizable=False) as program:
        for _ in program.run(steps=3):
            pass
        assert "examples are read one at a time, though reading waits" in program.explain()


def test_a_program_trains_on_the_same_examples_with_any_readers():
    def trained(source):
        with ad.Program(driver, jnp.zeros(()), source, global_batch=16, resizable=False) as program:
            for _ in program.run(steps=8):
                pass
            return float(program.state)

    assert trained(Waits()) == trained(Computes())


def test_threads_read_in_a_process_that_reads_too():
    data = ad.data.from_source(WhoReads(), num_readers=1)
    try:
        for _ in range(8):
            found = data.rows(np.arange(64))
        assert os.getpid() not in found["pid"]
        assert len(set(found["thread"].tolist())) > 2
    finally:
        data.close()


class WhoReads(Waits):
    def __getitem__(self, index):
        time.sleep(10 * WAIT)
        thread = threading.get_native_id() if index >= 48 else 0  # others are read twice, and must be the same
        return {**super().__getitem__(index), "pid": os.getpid(), "thread": thread}
