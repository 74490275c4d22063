"""The `World` protocol: what the runtime needs of the machines. `collectives` implements it.

A *process* runs this Python program; a *worker* computes one local batch. A process carries one worker per local device
that it was given, so there may be more workers than processes.

A world has `capacity` *worker slots*, numbered 0 … capacity-1 in rank order; a process carries the contiguous range
`workers`. Programs are compiled for the capacity, which is fixed. `members` are the occupied slots, and `size` is their
number. They may change between two steps: workers are lost, or a program requests another number of them. Available
workers that aren't members are in *reserve*.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from .world_members import WorldMembers
from .world_messages import WorldMessages


@runtime_checkable
class World(WorldMembers, WorldMessages, Protocol):
    """The worker slots of a job, the workers in them, and the collectives by which they exchange messages.

    `WorldMembers` says who is there, and changes it; `WorldMessages` exchanges messages. A part of the library that
    needs one of them asks for that one.
    """
