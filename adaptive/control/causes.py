"""Why batch sizes change from one step to the next: the requests, or the workers that joined, left or were lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from adaptive.base.decision import Decision


class Request(NamedTuple):
    """One request, made between two steps. Replicated.

    Attributes:
      by: the name of a hook, or of the method that the script called: "program.rescale".
      step: the last step before the request.
      decision: the requested changes.
      hook: whether a hook made it.
    """

    by: str
    step: int
    decision: Decision
    hook: bool = True

    @property
    def about_sizes(self) -> bool:
        """Whether it asks for a global batch or a split."""
        return self.decision.global_batch is not None or self.decision.shares is not None

    def fields(self) -> dict[str, Any]:
        """Return the fields that a record holds, without empty ones."""
        asked = {name: getattr(self.decision, name) for name in ("global_batch", "shares", "workers")}
        found = {name: value for name, value in asked.items() if value is not None}
        found |= {"stop": True} if self.decision.stop else {}
        found |= {"hyperparameters": dict(self.decision.hyperparameters)} if self.decision.hyperparameters else {}
        return {"hook" if self.hook else "script": self.by, "step": self.step, **found}


class Moved(NamedTuple):
    """A change of the members since the step before. Replicated.

    Attributes:
      joined: worker slots with a new worker.
      left: worker slots whose workers left.
      lost: worker slots whose workers were lost.
    """

    joined: tuple[int, ...]
    left: tuple[int, ...]
    lost: tuple[int, ...]

    def fields(self) -> dict[str, Any]:
        """Return the fields that a record holds, without empty ones."""
        return {name: list(slots) for name, slots in self._asdict().items() if slots}


Cause = Request | Moved


def followed_by(causes: Iterable[Cause], later: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return all causes in order, without requests whose batch sizes a later request overrides."""
    standing = list(causes)
    for cause in later:
        if isinstance(cause, Request):
            standing = [other for other in standing if not _overridden(other, cause)]
        standing.append(cause)
    return tuple(standing)


def names_of(requests: Sequence[Request], field: str) -> list[str]:
    """Return the names of the hooks that requested a field of a `Decision`."""
    return [r.by for r in requests if r.hook and getattr(r.decision, field) is not None]


def _overridden(earlier: Cause, later: Request) -> bool:
    if not isinstance(earlier, Request):
        return False
    pairs = zip(_of_sizes(earlier), _of_sizes(later), strict=True)
    return not any(before is not None and after is None for before, after in pairs)


def _of_sizes(request: Request) -> tuple[Any, ...]:
    return request.decision.global_batch, request.decision.shares
