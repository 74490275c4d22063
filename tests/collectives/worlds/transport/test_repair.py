"""Repairs that fail, and the settings of Open MPI."""

from __future__ import annotations

import pytest

from collectives.worlds.launch import LaunchError
from collectives.worlds.transport.repair import (
    COMPONENTS,
    ENABLED,
    TCP,
    WITHOUT_HAN,
    WITHOUT_REQUESTS,
    prepare_environment,
    repair,
    survives,
)
from tests.collectives.worlds.mpi_of_threads import MPI, Job, MPIError


def test_settings_of_open_mpi_are_set_unless_the_user_sets_them():
    environ: dict[str, str] = {}
    prepare_environment(environ)
    assert environ == {TCP: WITHOUT_REQUESTS}
    environ = {ENABLED: "1"}
    prepare_environment(environ)
    assert environ == {ENABLED: "1", TCP: WITHOUT_REQUESTS, COMPONENTS: WITHOUT_HAN}
    said = {ENABLED: "1", TCP: "send", COMPONENTS: "tuned"}
    prepare_environment(environ := dict(said))
    assert environ == said


@pytest.mark.parametrize(("lost", "expected"), [(None, True), ("continue", True), ("stop", False)])
def test_a_job_started_for_losses_survives_them_unless_it_is_to_stop(lost, expected):
    assert survives(lost, {ENABLED: "1"}) is expected


def test_a_job_not_started_for_losses_stops():
    assert survives(None, {}) is survives("stop", {}) is False
    with pytest.raises(LaunchError, match="adaptive run -n 4"):
        survives("continue", {})
    for environ in ({}, {ENABLED: "1"}):
        with pytest.raises(ValueError, match="'go on'"):
            survives("go on", environ)


def test_a_repair_that_fails_on_one_process_fails_on_all():
    """No process is lost, so another attempt would fail, too."""

    def use(comm):
        error = ZeroDivisionError if comm.rank else MPIError
        with pytest.raises(error):
            repair(MPI, comm, lambda new: 1 / (1 - comm.rank))
        return True

    assert Job(2).run(use) == [True] * 2
