"""What Open MPI is told before it is loaded."""

from __future__ import annotations

from collectives.worlds.transport.repair import (
    COMPONENTS,
    ENABLED,
    TCP,
    WITHOUT_HAN,
    WITHOUT_REQUESTS,
    prepare_environment,
)


def test_what_is_not_said_otherwise():
    environ: dict[str, str] = {}
    prepare_environment(environ)
    assert environ == {TCP: WITHOUT_REQUESTS}
    environ = {ENABLED: "1"}
    prepare_environment(environ)
    assert environ == {ENABLED: "1", TCP: WITHOUT_REQUESTS, COMPONENTS: WITHOUT_HAN}
    said = {ENABLED: "1", TCP: "send", COMPONENTS: "tuned"}
    prepare_environment(environ := dict(said))
    assert environ == said
