"""A JAX that is newer than the tested ones: a warning, once, and nothing else."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
from adaptive.base import versions


@pytest.fixture
def newest(monkeypatch):
    """Set the newest tested series, as if no program had been built yet."""

    def is_now(*series):
        monkeypatch.setattr(versions, "NEWEST_TESTED", series)
        versions.warn_if_untested.cache_clear()

    yield is_now
    versions.warn_if_untested.cache_clear()


def build():
    ad.Program(lambda w, batch: (w, {}), jnp.zeros(2), np.zeros((8, 2), np.float32), global_batch=4).close()


def test_the_first_program_warns_of_a_newer_jax(newest):
    newest(0, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        build()
        build()
    (one,) = [w for w in said if w.category is versions.UntestedVersionWarning]
    assert f"JAX {jax.__version__} is newer than the newest tested series, 0.4." in str(one.message)
    assert 'pip install "jax<0.5"' in str(one.message)
    assert one.filename == __file__


def test_a_tested_jax_is_no_matter(newest):
    newest(*map(int, jax.__version__.split(".")[:2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", versions.UntestedVersionWarning)
        build()


@pytest.mark.parametrize("version", ["0.12.9", "0.11.2", "0.12.0.1", "0.12.0.dev20260101", "0.9", "unknown", ""])
def test_versions_up_to_the_newest_series_are_tested(monkeypatch, version):
    monkeypatch.setattr(versions, "NEWEST_TESTED", (0, 12))
    assert versions.untested(version) == ""


@pytest.mark.parametrize("version", ["0.13.0", "0.13.0rc1", "0.13", "1.0", "1.0.0.dev1"])
def test_versions_of_later_series_are_not(monkeypatch, version):
    monkeypatch.setattr(versions, "NEWEST_TESTED", (0, 12))
    assert version in versions.untested(version)
