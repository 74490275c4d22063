"""The `World` protocol: what the runtime needs of the machines. `collectives` implements it.

A *process* runs this Python program; a *worker* computes one local batch. A process has one worker for each of its
local devices, so there may be more workers than processes.

A world has `capacity` *worker slots*, numbered 0 … capacity-1 in rank order; a process holds the contiguous range
`workers`. Programs are compiled for the capacity, which is fixed. `members` are the occupied slots, and `size` is their
number. Members may change between two steps: workers are lost, or a program requests another number of workers.
Available workers that aren't members are in *reserve*.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from .world_members import WorldMembers
from .world_messages import WorldMessages


@runtime_checkable
class World(WorldMembers, WorldMessages, Protocol):
    """The worker slots of a job, the workers in them, and the collectives by which they exchange messages.

    `WorldMembers` reports and changes the members; `WorldMessages` exchanges messages. Code that needs only one of the
    two takes that one as its argument's type.
    """
