"""The command `adaptive goodput`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click

from adaptive.observe.ledger import CAUSES, Ledger, goodput, read_ledger

from .command import one_line_errors
from .formatting import counted, duration, percent


@click.command(name="goodput")
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--run", default=-1, show_default="the last", metavar="N", help="Which run, if RECORD contains several: 0, 1, …"
)
@click.option(
    "--window",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="MINUTES",
    help="The length of the rolling window.",
)
@click.option("--json", "as_json", is_flag=True, help="Print seconds by cause as JSON.")
def goodput_command(record: Path, run: int, window: float, as_json: bool) -> None:
    """Print where the time of a recorded run went, by cause, restarts included.

    RECORD is a file written by `program.run(record="run.jsonl")`. Causes add up to the wall-clock time from the start
    of the first process to the last recorded step.
    """
    with one_line_errors(record):
        ledger = read_ledger(record, run)
    columns = windows(ledger, 60 * window)
    if as_json:
        counts = {name: getattr(ledger, name) for name in Ledger._fields if name not in ("ends", "seconds")}
        shares = {name: goodput(column) for name, column in columns.items()}
        click.echo(json.dumps({"wall": ledger.wall, "goodput": shares, "seconds": columns, **counts}))
        return
    click.echo(f"{record.name}: {in_words(ledger)}\n")
    click.echo(as_table(columns))


def windows(ledger: Ledger, window: float) -> dict[str, dict[str, float]]:
    """Return the seconds by cause over the run; and, if the run is longer than a window of this many seconds, over the
    last one and over the one with the least productive time.
    """
    columns = {"run": ledger.by_cause()}
    if (worst := ledger.worst(window)) is not None:
        columns |= {f"last {duration(window)}": ledger.by_cause(window), f"worst {duration(window)}": worst}
    return columns


def in_words(ledger: Ledger) -> str:
    """Return a ledger's counts in one line."""
    parts = [duration(ledger.wall), counted(ledger.steps, "step"), counted(ledger.starts, "start")]
    if ledger.restores:
        lost = f" ({counted(ledger.repeated, 'step')} with {counted(ledger.examples_lost, 'example')} taken again)"
        parts.append(counted(ledger.restores, "restore") + lost)
    if ledger.losses:
        parts.append(f"workers lost in {counted(ledger.losses, 'step')}")
    return ", ".join(parts)


def as_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Return seconds by cause as text, the productive ones first, then the costliest; causes below a millisecond are
    left out.
    """
    whole = next(iter(columns.values()))
    shown = [name for name in CAUSES if max(abs(column[name]) for column in columns.values()) >= 1e-3]
    shown.sort(key=lambda name: (name not in ("computing", "exchanging"), name == "unaccounted", -whole[name]))
    wide = max(map(len, (*shown, "goodput"))) + 2
    lines = [" " * wide + "".join(f"{name:>22}" for name in columns)]
    for name in shown:
        cells = (_cell(column[name], sum(column.values())) for column in columns.values())
        lines.append(f"{name:<{wide}}" + "".join(cells) + f"   {CAUSES[name]}")
    lines.append(f"{'goodput':<{wide}}" + "".join(f"{percent(goodput(column)):>22}" for column in columns.values()))
    return "\n".join(lines)


def _cell(seconds: float, total: float) -> str:
    sign = "−" if seconds < 0 else ""
    return f"{sign + duration(abs(seconds)):>14}{percent(abs(seconds) / total) if total else '–':>8}"
