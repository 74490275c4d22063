"""What to say where processes meet that are not about the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaptive import DisagreementError, WorkerError
from adaptive.extend import at

_SHOWN = 8  # different presences; a thousand ranks are in a few places


class Intent(NamedTuple):
    """What a process is about to do when it meets the others."""

    about: str  # in words; "" where nobody said
    text: str  # what is sent, in words
    more: str  # what else there is to say
    line: str  # of the user's file
    failure: str  # where it has failed, and how; "" where all is well
    leaves: bool  # the world, for good
    threads: Sequence[str]  # names of those that have used the world in this process
    world: str = ""  # which of several that meet in the same place


A_WORLD_EACH = "programs that run in threads of their own need a world each,  world=comm.MPIWorld()"


def disagreement_error(
    everyone: Sequence[Intent], own: int, threads: str = A_WORLD_EACH
) -> WorkerError | DisagreementError:
    """The error for the process `own`, which has not failed itself.

    Args:
      threads: what is to be done where several threads share a world.
    """
    failed = {rank: p.failure for rank, p in enumerate(everyone) if p.failure}
    mine = everyone[own]
    if failed:
        whys = "; ".join(f"{_ranks([r for r in failed if failed[r] == why])} failed {why}" for why in _unique(failed))
        where = f"{mine.about or 'a collective'}{at(mine.line)}"
        return WorkerError(f"{whys}\nIts own output says more. Rank {own} stops with it, in {where}.")
    same = len({p.about for p in everyone}) == 1
    one_world = len({p.world for p in everyone}) == 1
    doing = {
        rank: _doing(p, with_text=same or not p.about, world="" if one_world else f", in {p.world}")
        for rank, p in enumerate(everyone)
    }
    shown = [f"    {_ranks([r for r in doing if doing[r] == what])}: {what}" for what in _unique(doing)]
    rest = [f"    and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    advice = (
        f"Threads share this world, and which of them comes first is not the same on all ranks: {threads}"
        if any(len(p.threads) > 1 for p in everyone)
        else "All ranks must do the same things together, in the same order, on values of the same shapes."
    )
    return DisagreementError("\n".join(["ranks meet in different collectives:", *shown[:_SHOWN], *rest, advice]))


def _doing(p: Intent, *, with_text: bool, world: str) -> str:
    text = _shorten(p.text) if with_text else ""
    what = ": ".join(filter(None, [p.about, text])) or "a collective"
    return f"{what}{world}{at(p.line)}{f'; before it, {p.more}' if p.more else ''}"


def _unique(texts: dict[int, str]) -> list[str]:
    return list(dict.fromkeys(texts.values()))


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _shorten(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
