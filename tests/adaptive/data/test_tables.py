"""Data frames, tables and data sets of Hugging Face as data: by column, each with its own dtype, or refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.adapters import examples_of
from adaptive.data.iterable import IterableData
from adaptive.data.tables import by_column

COVERS = ("adaptive/data/columns.py", "adaptive/data/one_example.py", "adaptive/data/tensor_datasets.py")

IDS = np.array([16777217, 16777218, 16777219])  # float32 holds the second alone
TABLE = {
    "id": IDS,
    "price": np.array([0.5, 1.25, -2], np.float32),
    "pixel": np.array([7, 8, 255], np.uint8),
    "seen": np.array([True, False, True]),
}


def refused(data):
    with pytest.raises(ad.DataError) as error:
        examples_of(data)
    return str(error.value)


def batch_of(data, examples=3):
    """The examples that a program's driver sees in an epoch, in the order of `id`."""
    state = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), examples_of(data).shapes(1))

    def driver(state, batch):
        return jax.tree.map(lambda a: comm.broadcast(a[0]), batch), {}

    seen = []
    with ad.Program(driver, state, data, global_batch=1, resizable=False) as program:
        for _ in range(examples):
            program.step()
            seen.append(jax.tree.map(np.asarray, program.state))
    seen = jax.tree.map(lambda *a: np.stack(a), *seen)
    return jax.tree.map(lambda a: a[np.argsort(seen["id"])], seen)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == jax.dtypes.canonicalize_dtype(b.dtype)
        assert np.array_equal(a, b)


@pytest.fixture
def pd():
    return pytest.importorskip("pandas")


@pytest.fixture
def pl():
    return pytest.importorskip("polars")


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow")


@pytest.fixture
def hf():
    return pytest.importorskip("datasets")


# --- columns ----------------------------------------------------------------------------------------------------------


def pandas_frame(pd):
    return pd.DataFrame(TABLE, index=[5, 3, 3])


def nullable_frame(pd):
    return pandas_frame(pd).astype({"id": "Int64", "price": "Float32", "pixel": "UInt8", "seen": "boolean"})


def arrow_backed_frame(pd):
    pytest.importorskip("pyarrow")
    return pandas_frame(pd).convert_dtypes(dtype_backend="pyarrow")


@pytest.mark.parametrize("make", [pandas_frame, nullable_frame, arrow_backed_frame])
def test_a_data_frame_of_pandas_is_its_columns(pd, make):
    assert_same(batch_of(make(pd)), TABLE)


def test_a_table_of_another_library_is_its_columns(pl, pa):
    assert_same(batch_of(pl.DataFrame(TABLE)), TABLE)
    assert_same(batch_of(pa.table(TABLE)), TABLE)
    assert_same(batch_of(pa.RecordBatch.from_pydict(TABLE)), TABLE)
    chunks = pa.concat_tables([pa.table(TABLE).slice(0, 1), pa.table(TABLE).slice(1)])
    assert_same(batch_of(chunks), TABLE)


def test_tables_may_be_nested_and_lie_beside_arrays(pd, pl):
    y = np.arange(3)
    rows = examples_of({"table": pandas_frame(pd), "more": (pl.DataFrame({"z": y}), y)}).rows(np.array([2]))
    assert rows["table"]["id"].tolist() == [16777219]
    assert rows["more"][0]["z"].tolist() == rows["more"][1].tolist() == [2]
    assert len(ad.Shards([pandas_frame(pd), pandas_frame(pd)])) == 6
    mapped = ad.data.from_source(pandas_frame(pd), map=lambda row: {"next": row["id"] + 1})
    assert mapped.rows(np.array([0]))["next"].tolist() == [16777218]


def test_a_program_evaluates_and_checks_on_tables(pd):
    frame = pandas_frame(pd)

    def driver(state, batch):
        return state + comm.all_reduce(batch["price"].mean()), {}

    with ad.Program(driver, jnp.zeros(()), frame, global_batch=3) as program:
        mean = program.evaluate(lambda state, batch: (batch["id"] - 16777217).mean(), frame, batch=2)
        assert mean == 1
        assert program.check(frame)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_one_column_is_one_array(library):
    module = pytest.importorskip(library)
    column = {
        "pandas": lambda: module.Series(IDS, dtype="Int64"),
        "polars": lambda: module.Series(IDS),
        "pyarrow": lambda: module.chunked_array([IDS[:1], IDS[1:]]),
    }[library]()
    assert np.array_equal(examples_of(column).rows(np.arange(3)), IDS)
    assert np.array_equal(examples_of({"x": column}).rows(np.arange(3))["x"], IDS)


def test_columns_are_not_copied_where_the_library_can_say_where_they_lie(pd, pl, pa):
    numbers = np.arange(1000, dtype=np.float32)
    assert np.shares_memory(by_column(pd.DataFrame({"x": numbers}, copy=False))["x"], numbers)
    assert np.shares_memory(by_column(pa.table({"x": pa.array(numbers)}))["x"], numbers)
    series = pl.Series(numbers)
    assert np.shares_memory(by_column({"x": series})["x"], series.to_numpy(allow_copy=False))


def test_cells_that_are_lists_or_arrays_of_one_shape_are_one_more_dimension(pd, pl, pa):
    lists, arrays = [[1, 2], [3, 4], [5, 6]], [np.full((2, 3), k, np.uint8) for k in range(3)]
    wanted = {"tokens": np.array(lists), "image": np.stack(arrays)}
    rows = examples_of(pd.DataFrame({"tokens": lists, "image": arrays})).rows(np.arange(3))
    assert_same(rows, wanted)
    image = pa.array([a.tolist() for a in arrays], pa.list_(pa.list_(pa.uint8(), 3), 2))
    assert_same(examples_of(pa.table({"tokens": lists, "image": image})).rows(np.arange(3)), wanted)
    image = pl.Series([a.tolist() for a in arrays], dtype=pl.Array(pl.Array(pl.UInt8, 3), 2))
    assert_same(examples_of(pl.DataFrame({"tokens": lists, "image": image})).rows(np.arange(3)), wanted)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.stack(arrays))
    assert_same(examples_of(pa.table({"image": tensors})).rows(np.arange(3)), {"image": wanted["image"]})
    sliced = pa.table({"tokens": lists}).slice(1)
    assert examples_of(sliced).rows(np.arange(2))["tokens"].tolist() == lists[1:]


def test_structs_are_dicts_of_columns(pl, pa):
    rows = [{"a": 1, "b": [0.5, 1.5]}, {"a": 2, "b": [2.5, 3.5]}]
    wanted = {"s": {"a": np.array([1, 2]), "b": np.array([[0.5, 1.5], [2.5, 3.5]])}}
    assert_same(examples_of(pa.table({"s": rows})).rows(np.arange(2)), wanted)
    assert_same(examples_of(pl.DataFrame({"s": rows})).rows(np.arange(2)), wanted)


def test_batches_that_are_tables_are_taken_apart(pd, pa):
    def chunks():
        yield from (pandas_frame(pd), pandas_frame(pd).iloc[:1])

    data = IterableData(ad.data.from_iterator(chunks, batched=True), 1, [0])
    assert [row["id"].item() for row in data.first_examples(4)] == [*IDS.tolist(), 16777217]
    assert data.example["pixel"].dtype == np.uint8
    data = IterableData(ad.data.from_iterator(pa.table(TABLE).to_batches, batched=True), 1, [0])
    assert [row["id"].item() for row in data.first_examples(3)] == IDS.tolist()


def test_examples_that_are_tables_are_dicts_of_columns(pd):
    class Windows:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return {"window": pandas_frame(pd).iloc[i : i + 2], "y": i}

    rows = examples_of(Windows()).rows(np.arange(2))
    assert rows["window"]["id"].tolist() == [[16777217, 16777218], [16777218, 16777219]]
    assert rows["window"]["pixel"].dtype == np.uint8

    class Rows(Windows):
        def __getitem__(self, i):
            return pandas_frame(pd).iloc[i]

    assert "data[0] is a row of a data frame, in which pandas gives all columns one dtype" in refused(Rows())


# --- what is refused --------------------------------------------------------------------------------------------------


def bad_columns():
    return {
        "name": ["a", "b", "c"],
        "city": ["x", None, "z"],
        "age": [1, None, 3],
        "tokens": [[1, 2], [1], [3]],
        "id": IDS.tolist(),
    }


def test_a_frame_of_pandas_is_refused_with_all_columns_that_are_no_numbers(pd):
    frame = pd.DataFrame(bad_columns()).astype({"age": "Int64"})
    frame["kind"] = pd.Categorical(["u", "v", "u"])
    frame["when"] = pd.to_datetime(["2020", "2021", "2022"])
    frame["what"] = [{}, {}, {}]
    says = refused(frame)
    for part in (
        "data has columns that are not arrays of numbers:",
        "'name', 'city': text. Make numbers of them, or leave them out:  df.drop(columns=['name', 'city'])",
        "'age' (row 1): missing values. Fill them:  df['age'].fillna(0),  or leave the rows out:  "
        "df.dropna(subset=['age'])",
        "'kind': categories. Pass the codes:  df['kind'].cat.codes",
        "'when': times (datetime64",
        "'what': objects of Python (dict)",
        "'tokens': lists of different lengths (2 in row 0, 1 in row 1). Examples must have the same shapes: pad them",
    ):
        assert part in says
    df = frame.drop(columns=["name", "city", "when", "what", "tokens"])
    df["kind"] = df["kind"].cat.codes
    assert examples_of(df.assign(age=df["age"].fillna(0))).rows(np.arange(3))["age"].tolist() == [1, 0, 3]
    assert examples_of(df.dropna(subset=["age"])).rows(np.arange(2))["id"].tolist() == [16777217, 16777219]
    assert "data['table'] has columns that are not arrays" in refused({"table": frame, "y": np.arange(3)})


def test_a_frame_of_polars_is_refused_with_all_columns_that_are_no_numbers(pl):
    df = pl.DataFrame(bad_columns()).with_columns(
        kind=pl.Series(["u", "v", "u"], dtype=pl.Categorical), when=pl.date(2020, 1, 1)
    )
    says = refused(df)
    for part in (
        "'name', 'city': text. Make numbers of them, or leave them out:  df.drop(['name', 'city'])",
        "'age' (row 1): missing values. Fill them:  df['age'].fill_null(0),  or leave the rows out:  df.drop_nulls(['",
        "'kind': categories. Pass the codes:  df['kind'].to_physical()",
        "'when': times (Date)",
        "'tokens': lists of different lengths (2 in row 0, 1 in row 1)",
    ):
        assert part in says
    df = df.drop(["name", "city", "when", "tokens"])
    df = df.with_columns(df["kind"].to_physical(), df["age"].fill_null(0))
    assert examples_of(df).rows(np.arange(3))["age"].tolist() == [1, 0, 3]
    assert "data is a LazyFrame, which has not been read. Pass x.collect()." in refused(df.lazy())


def test_a_table_of_arrow_is_refused_with_all_columns_that_are_no_numbers(pa):
    import pyarrow.compute

    table = pa.table(bad_columns()).append_column("kind", pa.array(["u", "v", "u"]).dictionary_encode())
    table = table.append_column("when", pa.array([0, 1, 2], pa.timestamp("s")))
    says = refused(table)
    for part in (
        "'name', 'city': text. Make numbers of them, or leave them out:  table.drop_columns(['name', 'city'])",
        "'age' (row 1): missing values. Fill them:  pyarrow.compute.fill_null(table['age'], 0)",
        "'kind': dictionary-encoded. Pass the codes:  table['kind'].combine_chunks().indices",
        "'when': times (timestamp[s])",
        "'tokens': lists of different lengths (2 in row 0, 1 in row 1)",
    ):
        assert part in says
    kind, age = table["kind"].combine_chunks().indices, pyarrow.compute.fill_null(table["age"], 0)
    assert examples_of({"kind": kind, "age": age}).rows(np.arange(3))["age"].tolist() == [1, 0, 3]
    assert len(examples_of(table.drop_columns(["name", "city", "kind", "when", "tokens"]).drop_null())) == 2


def test_missing_values_in_lists_are_named_by_their_row(pl, pa):
    for table in (pl.DataFrame({"x": [[1, 2], [3, None]]}), pa.table({"x": [[1, 2], [3, None]]})):
        assert "'x' (row 1): missing values" in refused(table)


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (["a", None], "data['x'] holds text. Make numbers of it"),
        ([b"a", b"b"], "data['x'] holds bytes"),
        ([[1], None], "data['x'] holds missing values, the first in row 1. Fill them:  x.fillna(0)"),
        ([[1], [1, 2]], "data['x'] holds lists of different lengths (1 in row 0, 2 in row 1). Examples must have"),
    ],
)
def test_a_column_that_is_no_array_is_refused(pd, column, says):
    assert says in refused({"x": pd.Series(column)})


def test_names_of_columns_must_be_keys_of_a_dict(pd, pa):
    matrix = np.ones((3, 2))
    df = pd.DataFrame(matrix)
    assert "column names that are not text: 0, 1" in refused(df)
    assert list(by_column(df.rename(columns=str))) == ["0", "1"]
    df.columns = pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")])
    assert "column names of several levels. Join them:  df.columns = ['_'.join(map(str, c)) for c" in refused(df)
    df.columns = ["_".join(map(str, c)) for c in df.columns]
    assert list(by_column(df)) == ["a_b", "a_c"]
    assert "several columns of one name: 'a'. Rename them." in refused(pd.DataFrame(matrix, columns=["a", "a"]))
    assert "several columns of one name: 'a'" in refused(pa.Table.from_arrays([IDS, IDS], names=["a", "a"]))


def test_an_empty_table_is_refused(pd):
    assert "the data set is empty: data['id'] has shape (0,)" in refused(pandas_frame(pd).iloc[:0])
    assert "data is a table without columns" in refused(pd.DataFrame())


def test_a_list_of_tables_may_be_several_things(pd):
    says = refused([pandas_frame(pd), pandas_frame(pd)])
    assert "data is a list of 2 of DataFrame. Say what they are" in says
    assert "pandas.concat(data, ignore_index=True)" in says


# --- float64 ----------------------------------------------------------------------------------------------------------


WIDE = np.array([0.1, 0.2, 0.3])


class Source:
    """Examples made by a function."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return self.make(i)


def test_narrowing_float64_is_warned_of_once_with_the_leaves(pd):
    torch = pytest.importorskip("torch")
    for data, leaves in (
        ({"x": WIDE, "y": np.arange(3)}, "data['x']: "),
        (pd.DataFrame({"x": WIDE, "y": np.arange(3)}), "data['x']: "),
        ({"x": torch.from_numpy(WIDE)}, "data['x']: "),
        ([{"x": WIDE}, {"x": WIDE}], "data[i]['x']: "),
        (Source(lambda i: {"x": WIDE, "y": 0.5}), "data[i]['x']: "),
        ({str(k): WIDE for k in range(5)}, "data['0'], data['1'], data['2'] and 2 more: "),
    ):
        (note,) = examples_of(data).notes
        assert note.startswith(leaves + "float64, computed with as float32, because JAX's x64 mode is off")
    data = IterableData(ad.data.from_iterator(lambda: iter([{"x": WIDE}])), 1, [0])
    assert data.notes[-1].startswith("example['x']: float64")


def test_python_numbers_are_narrowed_without_a_note():
    for data in (
        {"x": WIDE.astype(np.float32), "y": np.arange(3)},
        [{"x": [0.1, 0.2], "y": 0.5}, {"x": [0.3, 0.4], "y": 0.5}],
        Source(lambda i: ([0.5 * i, 1.0], 0.5)),
    ):
        assert examples_of(data).notes == ()
    with jax.enable_x64(True):
        assert examples_of({"x": WIDE}).notes == ()


def test_a_program_warns_of_leaves_that_it_narrows():
    with ad.Program(lambda state, batch: (state, {}), jnp.zeros(()), {"x": WIDE}, global_batch=3) as program:
        assert "data['x']: float64, computed with as float32" in program.explain()
        assert any("data['x']: float64" in note for note in program.step().notes)
        assert not any("float64" in note for note in program.step().notes)


# --- lists in examples ------------------------------------------------------------------------------------------------


def with_lists(i):
    return [
        (i, [i, 2.5]),
        {"y": i, "x": [i, 2.5]},
        {"deep": ([[[i], [2.5]]], {"x": [i, 2.5]})},
        [np.arange(2) + i, [i, 2.5], 1],
        [i, 2.5],
    ]


@pytest.mark.parametrize("case", range(5))
def test_a_list_of_numbers_is_an_array_at_any_depth_in_any_example(case):
    wanted = [
        (np.array([0, 1]), np.array([[0, 2.5], [1, 2.5]])),
        {"y": np.array([0, 1]), "x": np.array([[0, 2.5], [1, 2.5]])},
        {
            "deep": (
                np.array([[[[0], [2.5]]], [[[1], [2.5]]]]).reshape(2, 1, 2, 1),
                {"x": np.array([[0, 2.5], [1, 2.5]])},
            )
        },
        [np.array([[0, 1], [1, 2]]), np.array([[0, 2.5], [1, 2.5]]), np.array([1, 1])],
        np.array([[0, 2.5], [1, 2.5]]),
    ][case]
    source = examples_of(Source(lambda i: with_lists(i)[case]))
    assert_same(source.rows(np.arange(2)), wanted)
    data = IterableData(ad.data.from_iterator(lambda: (with_lists(i)[case] for i in range(2))), 1, [0])
    assert_same(jax.tree.map(lambda *a: np.stack(a), *data.first_examples(2)), wanted)
    if case < 3:  # of lists, `data` may be a list of columns
        assert_same(examples_of([with_lists(i)[case] for i in range(2)]).rows(np.arange(2)), wanted)


def test_lists_in_a_pytree_of_data_are_pytrees():
    data = {"pair": [np.arange(3), np.arange(3) * 2]}
    assert [a.tolist() for a in examples_of(data).rows(np.array([1]))["pair"]] == [[1], [2]]
    read = ad.data.from_source(data, num_readers=1)
    try:
        assert jax.tree.structure(read.example) == jax.tree.structure({"pair": [0, 0]})
    finally:
        read.close()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [{"x": [1, 2]}, {"x": [1]}],
            "example['x'] of example 1 has shape (1,), of example 0 (2,). Examples must have",
        ),
        ([{"x": [1, 2]}, {"x": [1, None]}], "data[1]['x'][1] holds None. Put a number in its place"),
        ([{"x": 1}, {"x": 2}, {"x": None}], "example['x'] of example 2 is None, of example 0 an array. Put"),
        (
            [{"x": [[1], [1, 2]]}] * 2,
            "data[0]['x'] is a list of lists of different lengths. Examples must have the same",
        ),
        ([{"x": 1, "y": 2}, {"x": 1}], "example 1 has no example['y'], which example 0 has"),
        (
            [{"x": 16777217}, {"x": 0.5}],
            "data[0]['x'] holds 16777217, which float32 rounds; other examples hold floats",
        ),
    ],
)
def test_examples_that_differ_are_refused_by_leaf_and_row(rows, says):
    assert says in refused(rows)
    if "rounds" not in says:
        data = Source(rows.__getitem__)
        with pytest.raises(ad.DataError) as error:
            examples_of(data).rows(np.arange(len(rows)))
        assert says in str(error.value)


# --- PyTorch's TensorDataset ------------------------------------------------------------------------------------------


def test_a_tensor_dataset_is_taken_as_columns_unless_something_is_done_to_its_items():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, Subset, TensorDataset

    class Doubled(TensorDataset):
        def __getitem__(self, i):
            return tuple(2 * x for x in super().__getitem__(i))

    tensors = (torch.arange(12.0).reshape(6, 2), torch.arange(6, dtype=torch.uint8))
    data, some = TensorDataset(*tensors), [4, 2]
    for given, rows in ((data, [4, 2]), (DataLoader(data, 2, num_workers=1), [4, 2]), (Subset(data, some), [0, 1])):
        examples = examples_of(given)
        assert examples.in_memory
        x, y = examples.rows(np.array(rows))
        assert (x.tolist(), y.tolist(), y.dtype) == ([[8, 9], [4, 5]], [4, 2], np.uint8)
    assert "of tensors in memory" in examples_of(DataLoader(data, 2, num_workers=1)).notes[0]
    doubled = examples_of(Doubled(*tensors))
    assert not doubled.in_memory
    assert doubled.rows(np.array([4]))[1].tolist() == [8]
    mapped = ad.data.from_source(data, map=lambda item: item[0].mul(2).requires_grad_())
    assert mapped.rows(np.array([1])).tolist() == [[4, 6]]


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def hugging_face(hf, **more):
    features = {
        "id": hf.Value("int32"),
        "image": hf.Array2D((2, 3), "uint8"),
        "pixel": hf.Value("uint8"),
        "label": hf.ClassLabel(names=["a", "b"]),
        "short": hf.List(hf.Value("int16")),
        "two": hf.List(hf.Value("float32"), length=2),
        "part": {"a": hf.Value("int8")},
        "several": hf.List({"q": hf.Value("int8")}),
    }
    columns = {
        "id": IDS,
        "image": [np.full((2, 3), k, np.uint8) for k in range(3)],
        "pixel": [1, 2, 255],
        "label": [0, 1, 0],
        "short": [[1, 2]] * 3,
        "two": [[0.5, 1.5]] * 3,
        "part": [{"a": k} for k in range(3)],
        "several": [[{"q": 1}, {"q": k}] for k in range(3)],
    }
    features |= {name: feature for name, (feature, _) in more.items()}
    columns |= {name: column for name, (_, column) in more.items()}
    return hf.Dataset.from_dict(columns, features=hf.Features(features))


WANTED = {
    "id": IDS,
    "image": np.stack([np.full((2, 3), k, np.uint8) for k in range(3)]),
    "pixel": np.array([1, 2, 255], np.uint8),
    "label": np.array([0, 1, 0]),
    "short": np.array([[1, 2]] * 3, np.int16),
    "two": np.array([[0.5, 1.5]] * 3, np.float32),
    "part": {"a": np.arange(3, dtype=np.int8)},
    "several": {"q": np.array([[1, 0], [1, 1], [1, 2]], np.int8)},
}


def test_a_data_set_of_hugging_face_keeps_the_dtypes_of_its_features(hf):
    data = hugging_face(hf)
    assert_same(batch_of(data), WANTED)
    assert_same(batch_of(data.select([2, 0, 1]).with_format("numpy")), WANTED)
    picked = data.with_format("arrow", columns=["id", "image"])
    assert_same(batch_of(picked), {name: WANTED[name] for name in ("id", "image")})
    columns = {"id": data["id"], "image": data["image"]}
    assert_same(batch_of(columns), {name: WANTED[name] for name in ("id", "image")})


def test_images_of_hugging_face_are_decoded(hf):
    image = pytest.importorskip("PIL.Image")
    pixels = [np.full((2, 3, 3), k, np.uint8) for k in range(3)]
    data = hugging_face(hf, photo=(hf.Image(), list(map(image.fromarray, pixels))))
    assert_same(batch_of(data), WANTED | {"photo": np.stack(pixels)})
    assert np.array_equal(examples_of({"x": data["photo"]}).rows(np.arange(3))["x"], np.stack(pixels))


def test_a_stream_of_hugging_face_keeps_the_dtypes_of_its_features(hf):
    for data, batched in (
        (hugging_face(hf).to_iterable_dataset(), False),
        (hugging_face(hf).remove_columns("several").to_iterable_dataset().batch(2), True),
    ):
        found = IterableData(ad.data.from_iterator(data, batched=batched), 1, [0]).first_examples(3)
        wanted = {name: column for name, column in WANTED.items() if not batched or name != "several"}
        assert_same(jax.tree.map(lambda *a: np.stack(a), *found), wanted)


def test_torch_items_and_results_of_user_functions_are_unchanged(hf):
    torch = pytest.importorskip("torch")
    data = hugging_face(hf).select_columns(["id", "two"]).with_format("torch")
    assert_same(batch_of(data), {name: WANTED[name] for name in ("id", "two")})
    seen = []

    def collate(rows):
        seen.append(rows[0])
        return {"id": torch.tensor([row["id"] for row in rows])}

    text = hugging_face(hf, text=(hf.Value("string"), ["a", "bc", "def"]))
    loader = torch.utils.data.DataLoader(text, collate_fn=collate)
    assert examples_of(loader).rows(np.arange(3))["id"].tolist() == IDS.tolist()
    assert seen[0] == text[0]
    mapped = ad.data.from_source(text, map=lambda row: {"length": len(row["text"]), "image": row["image"]})
    assert_same(mapped.rows(np.arange(3)), {"length": np.array([1, 2, 3]), "image": WANTED["image"]})


def test_columns_of_text_are_refused_all_at_once(hf):
    text = hugging_face(hf, text=(hf.Value("string"), list("abc")), words=(hf.List(hf.Value("string")), [["a"]] * 3))
    columns = list(WANTED)
    says = "columns that hold no numbers: 'text' (string), 'words' (string). Leave them out:  "
    says += f"data.select_columns({columns})"
    assert says in refused(text)
    assert says in refused(text.to_iterable_dataset())
    assert_same(batch_of(text.select_columns(columns)), WANTED)
    assert "Pass one:  data['train']" in refused(hf.DatasetDict({"train": text}))


def test_rows_of_hugging_face_that_do_not_fit_are_named(hf):
    for column, says in (
        ([1, None, 3], "data[1]['x'] holds None. Put a number in its place"),
        ([[1, 2], [3, None], [4, 5]], "data[1]['x'] holds None. Put a number in its place"),
        ([[1, 2], [3], [4, 5]], "example['x'] of example 1 has shape (1,), of example 0 (2,). Examples"),
    ):
        data = examples_of(hf.Dataset.from_dict({"x": column}))
        with pytest.raises(ad.DataError) as error:
            data.rows(np.array([0, 1]))
        assert says in str(error.value)
