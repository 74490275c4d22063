"""What Open MPI is told before it is loaded."""

from __future__ import annotations

from collectives.worlds.transport.repair import COMPONENTS, ENABLED, TCP, WITHOUT_ASKING, WITHOUT_HAN, prepare


def test_what_is_not_said_otherwise():
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {TCP: WITHOUT_ASKING}
    environ = {ENABLED: "1"}
    prepare(environ)
    assert environ == {ENABLED: "1", TCP: WITHOUT_ASKING, COMPONENTS: WITHOUT_HAN}
    said = {ENABLED: "1", TCP: "send", COMPONENTS: "tuned"}
    prepare(environ := dict(said))
    assert environ == said
