"""The error that all processes raise if they are in different operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adaptive import DisagreementError, WorkerError
from adaptive.base.process.source_lines import at

_SHOWN = 8  # different intents in the message; even a thousand ranks are in a few places


class Intent(NamedTuple):
    """The operation that a process is about to run, sent to the others after a disagreement."""

    about: str  # description of the operation; "" if it has none
    text: str  # description of the data it sends
    more: str  # further information, not compared
    line: str  # the line of the user's file that called it
    failure: str  # where and how the process has failed; "" if it has not
    leaves: bool  # whether the process leaves the world with this operation
    threads: Sequence[str]  # names of the threads that have used the world in this process
    world: str = ""  # which of several worlds that share a transport


ONE_WORLD_EACH = "programs in threads of their own need a world each,  world=comm.MPIWorld()"


def disagreement_error(
    everyone: Sequence[Intent], own: int, threads: str = ONE_WORLD_EACH
) -> WorkerError | DisagreementError:
    """Return the error that the process with rank `own` raises; it has not failed itself.

    `everyone`: the intents of all processes, by rank. `threads`: the remedy if several threads share a world.
    """
    failed = {rank: p.failure for rank, p in enumerate(everyone) if p.failure}
    mine = everyone[own]
    if failed:
        whys = "; ".join(f"{_ranks([r for r in failed if failed[r] == why])} failed {why}" for why in _unique(failed))
        where = f"{mine.about or 'a collective'}{at(mine.line)}"
        return WorkerError(f"{whys}\nSee its own output for details. Rank {own} stops too, in {where}.")
    same = len({p.about for p in everyone}) == 1
    one_world = len({p.world for p in everyone}) == 1
    doing = {
        rank: _describe(p, with_text=same or not p.about, world="" if one_world else f", in {p.world}")
        for rank, p in enumerate(everyone)
    }
    shown = [f"    {_ranks([r for r in doing if doing[r] == what])}: {what}" for what in _unique(doing)]
    rest = [f"    and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    advice = (
        f"Threads share this world, and the order in which they use it differs between ranks: {threads}"
        if any(len(p.threads) > 1 for p in everyone)
        else "All ranks must call the same collectives, in the same order, on values of the same shapes."
    )
    return DisagreementError("\n".join(["ranks are in different collectives:", *shown[:_SHOWN], *rest, advice]))


def _describe(p: Intent, *, with_text: bool, world: str) -> str:
    text = _shorten(p.text) if with_text else ""
    what = ": ".join(filter(None, [p.about, text])) or "a collective"
    return f"{what}{world}{at(p.line)}{f'; before it, {p.more}' if p.more else ''}"


def _unique(texts: dict[int, str]) -> list[str]:
    return list(dict.fromkeys(texts.values()))


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _shorten(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
