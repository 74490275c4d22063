"""Arrays of checkpoints on disk."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from adaptive.disk import arrays


def test_arrays_are_read_as_they_were_written(tmp_path):
    given = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b/c": np.array([True, False])}
    arrays.write(given, tmp_path / "there")
    found = arrays.read(tmp_path / "there")
    assert found.keys() == given.keys()
    for name, array in given.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_an_error_of_the_system_is_raised_with_its_number(tmp_path, monkeypatch):
    def save(*args, **kwargs):
        raise ValueError(f"RESOURCE_EXHAUSTED: writing a chunk failed [os_error_code='{errno.ENOSPC}']")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", save)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        arrays.write({"a": np.ones(3)}, tmp_path / "there")
    assert caught.value.errno == errno.ENOSPC


def test_another_error_of_writing_is_raised_as_it_is(tmp_path, monkeypatch):
    def save(*args, **kwargs):
        raise ValueError("not a code")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", save)
    with pytest.raises(ValueError, match="not a code"):
        arrays.write({"a": np.ones(3)}, tmp_path / "there")
