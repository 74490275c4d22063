"""Pieces of a message on a timeline; `tests/program/test_overlap.py` has messages of steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from adaptive.runtime import sending


@pytest.mark.parametrize("checked", [True, False])
def test_pieces_are_on_the_timeline_from_the_end_of_the_one_before(monkeypatch, checked):
    """They may also be checked. The time in which the process waits for others does not count."""
    clock, events, seen = {"now": 10.0}, [], []
    monkeypatch.setattr(sending.time, "perf_counter", lambda: clock["now"])
    world = SimpleNamespace(waited=1.0)
    timeline = SimpleNamespace(add=lambda track, name, began, **details: events.append((name, began, details)))
    on_piece = sending.pieces_on(timeline, (lambda *piece: seen.append(piece[:2])) if checked else None, world)
    clock["now"], world.waited = 13.0, 3.0
    on_piece(0, 0, np.zeros(4))
    clock["now"] = 14.0
    on_piece(1, 4, np.zeros(2))
    assert events == [
        ("part 0", 12.0, {"elements": 4, "first": 0}),
        ("part 1", 13.0, {"elements": 2, "first": 4}),
    ]
    assert seen == ([(0, 0), (1, 4)] if checked else [])
