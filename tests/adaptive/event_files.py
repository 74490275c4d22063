"""Event files, read as TensorBoard does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def module(name: str) -> Any:
    """A module of tensorboardX, which imports PyTorch where that is installed: only for a test that reads."""
    return pytest.importorskip(f"tensorboardX.{name}")


def events(folder: Path) -> Iterator[Any]:
    """All events in a folder, file by file in the order of their names. A last event that was cut is left out."""
    event_pb2, record_writer = module("proto.event_pb2"), module("record_writer")
    for file in sorted(folder.iterdir()):
        raw = file.read_bytes()
        while len(raw) >= 12 and len(raw) >= 16 + (length := int.from_bytes(raw[:8], "little")):
            assert int.from_bytes(raw[8:12], "little") == record_writer.masked_crc32c(raw[:8])
            yield event_pb2.Event.FromString(raw[12 : 12 + length])
            raw = raw[16 + length :]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve as TensorBoard shows them: by its own reader, where it is installed, and by its rule."""
    event_pb2 = module("proto.event_pb2")
    shown: list[tuple[int, float]] = []
    for event in events(folder):
        if event.HasField("session_log") and event.session_log.status == event_pb2.SessionLog.START:
            shown = [point for point in shown if point[0] < event.step]
        shown += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return shown
    accumulator = EventAccumulator(str(folder), {"scalars": 0})
    accumulator.Reload()
    assert [(point.step, point.value) for point in accumulator.Scalars(tag)] == shown
    return shown
