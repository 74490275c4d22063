"""The shared compilation cache is the user's own, or there is none."""

from __future__ import annotations

import os
import pwd
import stat
import threading
from pathlib import Path

import jax
import pytest

from adaptive.runtime.kernels import cache as _cache
from adaptive.runtime.kernels.cache import CompilationCacheWarning, share_compilations
from tests.speed import limit


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where caches go, with none set up."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def folder():
    return jax.config.jax_compilation_cache_dir


def test_the_cache_is_in_a_private_folder(home):
    share_compilations()
    assert folder().startswith(str(home))
    assert stat.S_IMODE(os.stat(folder()).st_mode) == 0o700


def test_a_folder_that_is_set_up_already_is_left_alone(home):
    jax.config.update("jax_compilation_cache_dir", "/somewhere/else")
    share_compilations()
    assert folder() == "/somewhere/else"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("whose", ["others may write", "another user", "a link to one that others may write to"])
def test_a_folder_that_is_not_the_users_own_is_not_used(home, whose, monkeypatch, tmp_path_factory):
    share_compilations()
    own = Path(folder())
    if whose == "others may write":
        own.chmod(0o702)
    elif whose == "another user":
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    else:
        foreign = tmp_path_factory.mktemp("foreign")
        foreign.chmod(0o777)
        own.rmdir()
        own.symlink_to(foreign)
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.warns(CompilationCacheWarning, match="others may write to"):
        share_compilations()
    assert folder() is None


def test_without_a_home_there_is_no_cache(home, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    share_compilations()
    assert folder() is None


def test_of_processes_that_compile_one_program_the_others_wait_for_the_first(tmp_path, monkeypatch):
    folder = tmp_path / _cache._FOLDER / "host"
    folder.mkdir(parents=True)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    order, inside = [], threading.Event()

    def second():
        inside.wait(limit(30))
        with _cache.one_compiles("final"):
            order.append("second")

    other = threading.Thread(target=second)
    other.start()
    try:
        with _cache.one_compiles("final"):
            inside.set()
            with _cache.one_compiles("another"):
                order.append("another")
            other.join(0.1)
            order.append("first")
        other.join(limit(30))
        monkeypatch.setattr(_cache, "_MOST_SECONDS", 0.05)
        with _cache.one_compiles("final"), _cache.one_compiles("final"):  # who is stopped is not waited for for ever
            order.append("went on")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        with _cache.one_compiles("final"):
            order.append("a folder of the user's own")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert order == ["another", "first", "second", "went on", "a folder of the user's own"]
    assert [f.name for f in tmp_path.iterdir()] == [_cache._FOLDER]
    assert list(folder.iterdir()) == []
