"""Text for the requests of a run: which hook asked for what, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .columns import Columns, Notice
from .formatting import counted, listed, workers

FEW = 8  # up to this number of workers, each one's numbers are shown


class HookRequest(NamedTuple):
    """The request of one hook after a step.

    Attributes:
      by: the hook's name.
      wish: the requested fields.
    """

    by: str
    wish: Mapping[str, Any]


def asked(run: Columns, notice: Notice) -> list[HookRequest]:
    """Return the request of each hook after a step; for an older record, one request for all hooks."""
    decision = notice.decision or {}
    requests = decision.get("requests")
    if requests:
        return [HookRequest(request["hook"], request) for request in requests]
    return [HookRequest(hooks_behind(run, notice), decision)] if decision else []


def hooks_behind(run: Columns, notice: Notice) -> str:
    """Return the names of the hooks that made a decision; for the oldest records, which lack them, of the hooks that
    were due.
    """
    names = (notice.decision or {}).get("by")
    if names:
        return listed(names)
    step = int(run.step[notice.row])
    due = [hook["name"].partition("/")[2] or hook["name"] for hook in run.header["hooks"] if step % hook["every"] == 0]
    return " or ".join(due) or "a hook"


def moved_in_words(joined: Sequence[int], left: Sequence[int], lost: Sequence[int]) -> str:
    """Describe changes of the members: "worker 2 joined and worker 1 lost"."""
    pairs = (joined, "joined"), (lost, "lost"), (left, "left")
    return listed([f"{workers(slots)} {what}" for slots, what in pairs if slots]) or "workers joined or left"


def wish_in_words(wish: Mapping[str, Any]) -> str:
    """Describe a request: "a global batch of 112 and a split of 57 % : 43 %"; "" if it is empty."""
    found = []
    if wish.get("workers") is not None:
        found.append(counted(wish["workers"], "worker"))
    if wish.get("global_batch") is not None:
        found.append(f"a global batch of {wish['global_batch']:,}")
    if wish.get("shares"):
        found.append(_shares(wish["shares"]))
    if wish.get("stop"):
        found.append("the end")
    found += [f"{name} = {value}" for name, value in (wish.get("hyperparameters") or {}).items()]
    return listed(found)


def is_about_sizes(wish: Mapping[str, Any]) -> bool:
    """Return whether a request can change batch sizes. Hyperparameters and the end of the run cannot."""
    return any(wish.get(name) is not None for name in ("global_batch", "shares", "workers"))


def asks_for_more(wish: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether a request differs from the targets before it; True for shares, whose target is not recorded."""
    batch, number = wish.get("global_batch"), wish.get("workers")
    new = batch is not None and batch != before.get("global_batch")
    new |= number is not None and number != (before.get("workers") or [None])[0]
    return bool(new or any(wish.get(name) for name in ("shares", "stop", "hyperparameters")))


def _shares(shares: Sequence[float]) -> str:
    if len(shares) > FEW or sum(shares) <= 0:
        return "another split"
    return "a split of " + " : ".join(f"{share / sum(shares):.0%}".replace("%", " %") for share in shares)
