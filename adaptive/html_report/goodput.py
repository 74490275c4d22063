"""The command `adaptive goodput`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from adaptive.observe.ledger import CAUSES, PRODUCTIVE, Ledger, read_ledger

from .command import one_line_errors
from .formatting import counted, duration, percent


@click.command(name="goodput")
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--run", default=-1, show_default="the last", metavar="N", help="Which run, if RECORD contains several: 0, 1, …"
)
@click.option("--json", "as_json", is_flag=True, help="Print seconds by cause as JSON.")
def goodput_command(record: Path, run: int, as_json: bool) -> None:
    """Print where the time of a recorded run went, by cause, restarts included.

    RECORD is a file written by `program.run(record="run.jsonl")`. Causes add up to the wall-clock time from the start
    of the first process to the last recorded step.
    """
    with one_line_errors(record):
        ledger = read_ledger(record, run)
    if as_json:
        click.echo(json.dumps({"wall": ledger.wall, "goodput": ledger.goodput, **ledger._asdict()}))
        return
    click.echo(f"{record.name}: {in_words(ledger)}\n")
    click.echo(as_table(ledger))


def in_words(ledger: Ledger) -> str:
    """Return a ledger's counts in one line."""
    parts = [duration(ledger.wall), counted(ledger.steps, "step"), counted(ledger.starts, "start")]
    if ledger.restores:
        lost = f" ({counted(ledger.repeated, 'step')} with {counted(ledger.examples_lost, 'example')} taken again)"
        parts.append(counted(ledger.restores, "restore") + lost)
    if ledger.losses:
        parts.append(f"workers lost in {counted(ledger.losses, 'step')}")
    return ", ".join(parts)


def as_table(ledger: Ledger) -> str:
    """Return seconds by cause as text, the productive ones first, then the costliest; causes below a millisecond are
    left out.
    """
    seconds = ledger.seconds
    shown = [name for name in CAUSES if abs(seconds[name]) >= 1e-3]
    shown.sort(key=lambda name: (name not in PRODUCTIVE, name == "unaccounted", -seconds[name]))
    wide = max(map(len, (*shown, "goodput"))) + 2
    lines = [f"{name:<{wide}}{_cell(seconds[name], ledger.wall)}   {CAUSES[name]}" for name in shown]
    return "\n".join([*lines, f"{'goodput':<{wide}}{percent(ledger.goodput):>22}"])


def _cell(seconds: float, total: float) -> str:
    sign = "−" if seconds < 0 else ""
    return f"{sign + duration(abs(seconds)):>14}{percent(abs(seconds) / total) if total else '–':>8}"
