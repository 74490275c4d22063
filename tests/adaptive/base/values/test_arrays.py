"""Arrays of other libraries as data, as state and in collectives: the same numbers, or refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.base.values.arrays import NotAnArrayError, as_numpy, is_array, on_host
from adaptive.data.rows import rows_of

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def trained(data, driver, state=None):
    """A program that has taken one step, and its report."""
    with ad.Program(driver, jnp.zeros(()) if state is None else state, data, global_batch=4) as program:
        return program, program.step()


def refused(data, says):
    with pytest.raises(ad.DataError) as error:
        rows_of(data)
    assert says in str(error.value)


class Source:
    """Examples, one by one."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i]}


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


EXACT = [
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8", "int8", "int16", "int32"),
    *("uint16", "uint32", "complex64"),
]


@pytest.mark.parametrize("name", EXACT)
def test_a_tensor_is_the_array_of_the_same_bits(torch, name):
    dtype = jnp.dtype(name)
    raw = np.random.default_rng(0).integers(0, 256, 16 * dtype.itemsize, np.uint8)
    raw = raw % 2 if name == "bool" else raw
    tensor = torch.from_numpy(raw).view(getattr(torch, name))
    array = on_host(tensor)
    assert array.dtype == dtype
    assert array.tobytes() == raw.tobytes()
    row = rows_of({"x": tensor}).rows(np.array([3]))["x"]
    assert (row.dtype, row.tobytes()) == (dtype, raw.view(dtype)[3:4].tobytes())


def test_tensors_are_detached_and_views_resolved(torch):
    z = torch.tensor([1 + 2j, 3 - 4j], requires_grad=True)
    assert on_host(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert on_host(z.conj().imag).tolist() == [-2, 4]
    assert on_host(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]
    assert on_host(torch.tensor(2.5)).shape == ()
    assert on_host(torch.arange(6).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert on_host(torch.ones(2, requires_grad=True).bfloat16()).dtype == ml_dtypes.bfloat16


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of what it calls beta
def test_tensors_that_have_no_numbers_are_refused_by_name(torch):
    eye, halves = torch.eye(4), torch.ones(4, dtype=torch.complex32)
    for tensor in (eye.to_sparse(), eye.to_sparse_csr(), eye.to("meta"), halves):
        dtype = str(tensor.dtype).removeprefix("torch.")
        refused({"x": tensor}, f"data['x'] cannot be read as an array of {dtype}: ")


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_state_of_tensors_is_a_state_of_arrays(torch, name):
    state = {"w": torch.full((2,), 0.5, dtype=getattr(torch, name), requires_grad=True)}

    def driver(state, batch):
        return {"w": state["w"] + comm.all_reduce(batch.mean()).astype(state["w"].dtype)}, {}

    program, _ = trained(np.ones((4, 2), np.float32), driver, state)
    assert program.state["w"].dtype == jnp.dtype(name)
    assert program.state["w"].tolist() == [1.5, 1.5]
    assert state["w"].tolist() == [0.5, 0.5]


def test_collectives_and_hooks_take_tensors_as_constants(torch):
    for tensor in (torch.full((2,), 3.0, requires_grad=True), torch.full((2,), 3.0, dtype=torch.bfloat16)):
        assert comm.all_reduce(tensor, op="sum").tolist() == [3, 3]
        seen = []

        def driver(state, batch, tensor=tensor, seen=seen):
            ctrl.hook(lambda control, value: seen.append(value.tolist()), tensor)
            return state, {"sum": comm.all_reduce(tensor, op="sum")}

        _, report = trained(X, driver)
        assert report.metrics["sum"].tolist() == [3, 3]
        assert seen == [[3, 3]]
    with pytest.raises(ad.CollectiveError, match=r"a tensor that cannot be read as an array of float32: .*to_dense"):
        comm.all_reduce(torch.eye(2).to_sparse(), op="sum")

    def driver(state, batch):
        ctrl.hook(lambda control, value: None, torch.eye(2).to_sparse())
        return state, {}

    with pytest.raises(ad.CollectiveError, match="must be pytrees of numbers: cannot be read as an array of float32"):
        trained(X, driver)


# --- what numpy and others have ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i2", "i4", "i8", "u2", "c8"])
def test_big_endian_numbers_are_read_in_this_machines_order(dtype, tmp_path):
    swapped = np.arange(12).reshape(4, 3).astype(f">{dtype}")
    swapped.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", f">{dtype}", "r", shape=(4, 3))
    fields = np.zeros(4, [("a", f">{dtype}", 3)])
    fields["a"] = swapped
    for given in (
        swapped,
        mapped,
        fields["a"],
        ad.data.from_source({"x": swapped}, map=lambda e: e["x"]),
    ):
        row = rows_of(given).rows(np.array([1]))
        row = row["x"] if isinstance(row, dict) else row
        assert row.dtype.isnative
        assert row.dtype == jax.dtypes.canonicalize_dtype(np.dtype(dtype))
        assert row.tolist() == [[3, 4, 5]]


def test_the_error_about_a_sparse_matrix_says_what_to_write():
    sparse = pytest.importorskip("scipy.sparse")
    for make in (sparse.csr_matrix, sparse.csr_array, sparse.coo_array, sparse.lil_matrix):
        refused({"x": make(X)}, f"data['x'] is a sparse matrix ({make.__name__}). Pass x.toarray().")
        refused(make(X), f"data is a sparse matrix ({make.__name__}). Pass x.toarray().")


def test_sparse_matrices_are_known_by_their_library_and_method():
    refused(BCOO.fromdense(X), "data is a sparse matrix (BCOO). Pass x.todense().")
    refused({"x": BCOO.fromdense(X), "y": X}, "data['x'] is a sparse matrix (BCOO). Pass x.todense().")
    coo = type("COO", (), {"__module__": "sparse.numba_backend._coo", "todense": lambda self: X})
    refused({"x": coo()}, "data['x'] is a sparse matrix (COO). Pass x.todense().")
    lazy = type("Lazy", (), {"todense": lambda self: X})
    part = type("Part", (), {"__module__": "sparse.parts"})
    assert [is_array(lazy()), is_array(part())] == [False, False]


def test_an_error_of_a_librarys_array_method_is_passed_on():
    class Mine:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("copy it from the device first")

    refused({"x": Mine()}, "data['x'] cannot be read as an array: copy it from the device first")


# --- numbers that do not fit ------------------------------------------------------------------------------------------


WIDE = [(np.int64, 2**31), (np.int64, -(2**31) - 1), (np.uint64, 2**32), (np.float64, 1e40), (np.float64, -1e39)]


@pytest.mark.parametrize(("dtype", "value"), WIDE)
def test_a_number_that_does_not_fit_is_named_by_leaf_row_and_value(dtype, value, tmp_path):
    array = np.zeros((6, 2), dtype)
    array[4, 1] = value
    says = f"[4, 1] holds {array[4, 1].item()!r}, which {jax.dtypes.canonicalize_dtype(dtype)} cannot"
    refused({"x": array}, f"data['x']{says}")

    np.save(tmp_path / "x.npy", array)
    mapped = rows_of({"x": np.load(tmp_path / "x.npy", mmap_mode="r")})
    with pytest.raises(ad.DataError) as error:
        mapped.rows(np.array([0, 5, 4, 2]))
    assert f"data['x']{says}" in str(error.value)

    source = rows_of(Source(array))
    with pytest.raises(ad.DataError) as error:
        source.rows(np.array([0, 5, 4, 2]))
    assert f"example 4['x']{says.replace('4, ', '')}" in str(error.value)


def test_infinite_numbers_stay_infinite():
    given = np.array([np.inf, -np.inf, np.nan, 1e-300, 3e38])
    assert np.array_equal(on_host(given), given.astype(np.float32), equal_nan=True)
    both = np.array([complex(np.inf, 1), complex(np.nan, np.inf)])
    assert np.array_equal(on_host(both), both.astype(np.complex64), equal_nan=True)
    with pytest.raises(NotAnArrayError):
        on_host(np.array([complex(np.inf, 1e40)]))
    with jax.enable_x64(True):
        assert on_host(np.array([1e40])).tolist() == [1e40]


class Python:
    """A source of one Python number."""

    def __init__(self, value):
        self.value = value

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {"y": self.value}


def test_a_python_number_that_does_not_fit_is_refused():
    for value in (1e40, 2**40, 2**70):
        refused(Python(value), "data[0]['y'] holds ")


def test_numbers_keep_their_width_until_they_are_computed_with():
    assert as_numpy(np.zeros(2)).dtype == np.float64
    assert as_numpy(np.zeros(2, ">f8")).dtype.isnative
