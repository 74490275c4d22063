"""Notes about a worker slot are about its present worker."""

from __future__ import annotations

from types import SimpleNamespace

from adaptive.base.decision import Limits
from adaptive.base.roster import Roster
from adaptive.base.world import Loss
from adaptive.control.batch_sizes import BatchSizes
from adaptive.program.member_tracker import MemberTracker


def test_a_worker_that_leaves_a_reused_slot_counts_as_left():
    world = SimpleNamespace(members=(0, 1), joined_in_generation=(0, 0), generation=0, workers=range(1), losses=())
    ignored = SimpleNamespace(change_members=lambda *_: None, workers=SimpleNamespace(change_members=lambda *_: None))
    sizes = BatchSizes(12, None, Limits((1, 1), (20, 20)))
    tracker = MemberTracker(world, ignored, ignored, sizes, Roster.of(world))

    def then(members, since, losses):
        world.members, world.joined_in_generation, world.losses, world.generation = (
            members,
            since,
            losses,
            world.generation + 1,
        )
        sizes.step_done()
        tracker.refresh()
        return tracker.drain_events()[2]

    loss = Loss((1,), "rank 1 (pid 7 on node)", "message 1 of step 2", 0.003)
    assert then((0,), (0,), (loss,)) == [str(loss)]
    then((0, 1), (0, 2), (loss,))
    assert then((0,), (0,), (loss,)) == ["worker slot 1 is empty: its worker has left."]


def test_a_worker_that_replaces_another_one_counts_as_new():
    world = SimpleNamespace(
        members=(0, 1, 2), joined_in_generation=(0, 0, 0), generation=0, workers=range(1, 3), losses=()
    )
    seen, reset = [], []
    workers = SimpleNamespace(change_members=lambda *given: seen.append(given))
    hooks = SimpleNamespace(change_members=lambda joined, sizes: reset.append(joined))
    sizes = BatchSizes(12, None, Limits((1,) * 3, (20,) * 3))
    tracker = MemberTracker(world, SimpleNamespace(workers=workers), hooks, sizes, Roster.of(world))
    assert (seen, tracker.changed, tracker.places([0, 2])) == ([([0, 1], ())], False, [1])
    world.joined_in_generation, world.generation = (0, 4, 0), 4
    assert tracker.changed
    assert tracker.refresh() == [1]
    assert (seen[-1], reset, tracker.changed) == (([0, 1], [0]), [[1]], False)
    assert tracker.drain_events() == ((1,), (), ["a worker has joined in worker slot 1."])
    assert tracker.drain_events() == ((), (), [])
    tracker.restart([0, 2])  # of the members at a checkpoint
    assert (tracker.changed, seen[-1]) == (True, ([1], ()))
    assert tracker.refresh() == [1]
    tracker.restart([0, 1, 2])
    assert (tracker.changed, seen[-1]) == (False, ([0, 1], ()))
    world.losses = tuple(Loss((slot,), f"rank {slot}", "message 1 of step 2", 0.0) for slot in (1, 2))
    assert tracker.drain_events()[1] == world.losses
    assert tracker.drain_events()[1] == ()
