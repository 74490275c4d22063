"""A program is what it was compiled from, wherever it comes from."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from adaptive.runtime.cache import CompilationCacheWarning
from adaptive.runtime.compile import compile_segment

SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


@pytest.fixture
def folder(tmp_path):
    """A compilation cache with nothing in it."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


def update(rate, device=None):
    """A program that depends on a number."""
    return compile_segment(lambda x: x - rate * x, (SHAPE,), device or jax.local_devices()[0], name="update")


def name_of(compiled):
    (module,) = compiled.runtime_executable().hlo_modules()
    return module.name


def result(compiled):
    return float(compiled(np.ones(2, np.float32))[0])


def test_programs_are_named_for_what_they_compute():
    assert re.fullmatch(r"update_[0-9a-f]{16}", name_of(update(0.25)))
    assert name_of(update(0.25)) == name_of(update(0.25)) != name_of(update(0.5))
    assert name_of(update(0.25)) == name_of(update(0.25, jax.local_devices()[1]))


def test_where_a_line_stands_is_no_part_of_what_it_computes():
    def above(x):
        return x - 0.25 * x

    assert name_of(compile_segment(above, (SHAPE,), jax.local_devices()[0], name="update")) == name_of(update(0.25))


def test_a_program_is_read_from_the_cache(folder):
    update(0.25)
    (entry,) = folder.glob("update_*-cache")
    before = entry.read_bytes()
    assert result(update(0.25)) == 0.75
    assert [entry.read_bytes()] == [before]
    assert list(folder.glob("update_*-cache")) == [entry]


def test_a_program_in_the_place_of_another_is_not_run(folder):
    update(0.25), update(0.5)
    one, other = folder.glob("update_*-cache")
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    for rate in (0.25, 0.5):
        with pytest.warns(CompilationCacheWarning, match=f"{folder} holds another program under the name of update_"):
            assert result(update(rate)) == 1 - rate


def test_memory_is_given_up_where_it_may_be():
    run = compile_segment(lambda x: x + 1, (SHAPE,), jax.local_devices()[0], donate=True)
    old = jax.device_put(np.ones(2, np.float32), jax.local_devices()[0], may_alias=False)
    assert run(old)[0] == 2
    assert old.is_deleted()
