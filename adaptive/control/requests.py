"""Requests of hooks and of the script, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from adaptive.base.decision import Decision


class Request(NamedTuple):
    """One request, made between two steps. Replicated."""

    by: str  # the name of a hook, or of the method that the script called: "program.rescale"
    step: int  # the last step before the request
    decision: Decision
    hook: bool = True

    def fields(self) -> dict[str, Any]:
        """Return the fields that a record holds, without empty ones."""
        asked = {name: getattr(self.decision, name) for name in ("global_batch", "shares", "workers")}
        found = {name: value for name, value in asked.items() if value is not None}
        found |= {"stop": True} if self.decision.stop else {}
        found |= {"hyperparameters": dict(self.decision.hyperparameters)} if self.decision.hyperparameters else {}
        return {"hook" if self.hook else "script": self.by, "step": self.step, **found}


def hooks_in_words(names: Sequence[str]) -> str:
    """Return "hook 'grow'", or "hooks 'grow', 'stop'"; without hooks, the method that the script called."""
    return f"hook{'s' * (len(names) > 1)} {', '.join(map(repr, names))}" if names else "program.rescale"
