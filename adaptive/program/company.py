"""Who takes the next step: between two of them some leave and others join, and one in reserve waits until it does."""

from __future__ import annotations

from typing import NamedTuple

from adaptive.base.world import World

from .hand_over import Known, pack, room, unpack
from .tracing import Traced
from .watch import StepClock, UpdateCheck


class Until(NamedTuple):
    """Where a run ends, unless a hook ends it before. Replicated."""

    epoch: int | None = None
    step: int | None = None


class Course(NamedTuple):
    """Where a run stands. Replicated."""

    step: int  # steps done
    until: Until
    stopped: bool  # by a hook
    run_id: str
    traced: Traced | None = None


class RunEnds(Exception):
    """There is no next step in this run. On all processes that take part in it."""


class RunOver(RunEnds):
    """The workers have ended the run for which this process was in reserve, and it knows what they do.

    Attributes:
      course: where their run stands.
    """

    def __init__(self, course: Course):
        super().__init__()
        self.course = course


class AllLeave(RunEnds):
    """Processes were told to go, and the others cannot go on without them, or there are none. Its text says why."""


class Company:
    """The processes that take a program's steps, as one of them sees it.

    Args:
      name: of the program.
      known: what is handed over to newcomers.
    """

    def __init__(self, world: World, name: str, known: Known, clock: StepClock, update: UpdateCheck):
        self._world, self._name, self._known, self._clock, self._update = world, name, known, clock, update

    @property
    def settled(self) -> bool:
        """Whether `gather` has nothing to do: nobody leaves, joins, is in reserve, or was lost since the last step."""
        known, world = self._known, self._world
        return not (known.membership.due or world.in_reserve or world.needs_state_transfer or known.seating.changed)

    def gather(self, course: Course) -> Course:
        """Let those leave and join who are to; notice who has, since the last step. In reserve, wait to join.

        Returns:
          Where the run stands: as before, but for newcomers.

        Raises:
          RunEnds: there is no next step.
        """
        self._change(course.step)
        while self._world.in_reserve:
            self._world.wait(self._known.engine.kernels.can_join)
            if not self._world.in_reserve:
                self._clock.restart()
        over = self._world.needs_state_transfer and not self._world.run_under_way
        course = self.hand_over(course)
        if over:
            raise RunOver(course)
        seating = self._known.seating
        if seating.changed:
            self._clock.forget(seating.places(seating.take()))
        return course

    def _change(self, step: int) -> None:
        membership = self._known.membership
        if not membership.due or self._world.in_reserve:
            return
        self._update.together(step, "a change of members")
        leave = membership.change(f"after step {step} of {self._name}")
        if membership.all_leave:
            signals = " and ".join(sorted({leaver.signal for leaver in leave}))
            raise AllLeave(f"{membership.why_all_leave} ({signals})")
        if leave:
            self._known.seating.note(f"told to go, and left after step {step}: {', '.join(map(str, leave))}.")

    def hand_over(self, course: Course) -> Course:
        """Let those who have come in know what the others know. Returns where the run stands."""
        if not self._world.needs_state_transfer:
            return course
        known = self._known
        known.hooks.catch_up(known.sizes)
        about = f"what newcomers have to know of {self._name}"
        baggage = self._world.transfer_state(lambda: pack(known, tuple(course)), lambda: room(known), about)
        if baggage is None:
            return course
        self._update.told = False
        step, until, stopped, run_id, traced = unpack(known, baggage)
        return Course(step, Until(*until), stopped, run_id, traced and Traced(*traced))
