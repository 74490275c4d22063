"""Arrays of checkpoints come back from the disk as they were, and errors of the disk keep their numbers."""

from __future__ import annotations

import errno
import os

import jax.numpy as jnp
import numpy as np
import pytest

from adaptive.disk import arrays

DTYPES = ["bool", "int4", "int8", "uint16", "int64", "uint64", "float16", "bfloat16", "float8_e4m3fn", "float32"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "complex64", "complex128"])
def test_arrays_round_trip(tmp_path, dtype):
    values = np.arange(6).astype(jnp.dtype(dtype))
    given = {"00000": values, "00001": values.reshape(2, 3), "00002": values[1], "00003": values[2:3].reshape(())}
    arrays.write({name: np.asarray(value) for name, value in given.items()}, tmp_path / "arrays")
    found = arrays.read(tmp_path / "arrays")
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].tobytes() == value.tobytes()


def test_an_error_of_the_system_is_raised_with_its_number(tmp_path, monkeypatch):
    def save(*args, **kwargs):
        raise ValueError(f"RESOURCE_EXHAUSTED: writing a chunk failed [os_error_code='{errno.ENOSPC}']")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", save)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        arrays.write({"a": np.ones(3)}, tmp_path / "there")
    assert caught.value.errno == errno.ENOSPC


def test_other_errors_of_writing_are_raised_unchanged(tmp_path, monkeypatch):
    def save(*args, **kwargs):
        raise ValueError("not a code")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", save)
    with pytest.raises(ValueError, match="not a code"):
        arrays.write({"a": np.ones(3)}, tmp_path / "there")
