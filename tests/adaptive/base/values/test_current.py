"""What has no world runs alone only where it is alone."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pytest

import adaptive as ad
import collectives as comm
from tests.adaptive.drivers import make_data


def driver(state, batch):
    return state + comm.all_reduce(batch["y"].mean()), {}


def build(**options):
    return ad.Program(driver, 0.0, make_data(8), global_batch=8, **options)


@pytest.fixture
def launched(monkeypatch):
    """As a rank of several, as far as the environment tells."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")


def in_a_thread(work):
    """Return what `work` raises in another thread."""
    errors = []

    def run():
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_a_program_without_a_world_is_refused_under_a_launcher_of_several(launched):
    with pytest.raises(ad.DriverError) as error:
        build()
    text = str(error.value)
    assert text.startswith("ad.Program (test_current.py:")
    assert "Open MPI's mpirun started 4 processes, of which this is one" in text
    assert "program = ad.Program(..., world=world)" in text
    assert "world=comm.SoloWorld()" in text


@pytest.mark.parametrize("collective", [comm.all_gather, comm.broadcast, lambda x: comm.all_reduce(x, op="sum")])
def test_an_eager_collective_without_a_world_is_refused_too(launched, collective):
    with pytest.raises(ad.CollectiveError, match=r"(?s)outside a program \(test_current.py:\d+\) has no world.*4 proc"):
        collective(jnp.ones(2))
    with comm.SoloWorld():
        collective(jnp.ones(2))


@pytest.mark.parametrize("environment", [{}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"PMIX_RANK": "3"}])
def test_alone_or_where_the_launcher_does_not_say_nothing_is_refused(monkeypatch, environment):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with build() as program:
        program.step()
    assert comm.all_reduce(2.0) == 2.0


def test_in_another_thread_than_the_block_a_world_has_to_be_given():
    with comm.DeviceWorld() as world:
        for work in (build, ad.num_workers, lambda: comm.all_gather(1.0)):
            error = in_a_thread(work)
            assert isinstance(error, ad.DriverError)
            assert f"{world!r} was entered in another thread" in str(error)
        assert in_a_thread(lambda: build(world=world).close()) is None
    assert in_a_thread(lambda: build().close()) is None
