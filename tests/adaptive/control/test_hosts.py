"""Processes on machines of several kinds: what they know of each other, and who decides."""

from __future__ import annotations

import json
from types import SimpleNamespace

from adaptive.control import hosts
from adaptive.control.hosts import HostSurvey

#          kind, host
MACHINES = [("a", "n1 4f"), ("a", "n1 4f"), ("b", "n2 9d"), ("a", "n1 4f")]


def survey(monkeypatch, machines, rank):
    for name, value in zip(("kind_of_machine", "this_host"), machines[rank], strict=True):
        monkeypatch.setattr(hosts, name, lambda *_, value=value: value)
    everyone = [json.dumps([*machine, f"id {rank}"]).encode() for rank, machine in enumerate(machines)]
    world = SimpleNamespace(
        processes=len(machines), rank=rank, devices=(), all_gather_bytes=lambda own, about: everyone
    )
    return HostSurvey(world)


def test_each_process_knows_the_hosts(monkeypatch):
    found = [survey(monkeypatch, MACHINES, rank) for rank in range(4)]
    assert {(each.heterogeneous, each.host_names) for each in found} == {(True, ("n1", "n2"))}
    assert {each.run_id for each in found} == {"id 0"}
    assert [each.on_this_host for each in found] == [3, 3, 1, 3]


def test_machines_of_one_kind_are_homogeneous_however_many_there_are(monkeypatch):
    assert not survey(monkeypatch, [MACHINES[0], ("a", "n3 11")], 1).heterogeneous
    alone = survey(monkeypatch, MACHINES[:1], 0)
    assert (alone.heterogeneous, alone.on_this_host) == (False, 1)
