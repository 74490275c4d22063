"""The command `adaptive report`."""

from __future__ import annotations

from pathlib import Path

import click

from adaptive.base.errors import RecordError
from adaptive.observe.ledger import CAUSES, Ledger
from adaptive.observe.scalars import counted

from .columns import Columns
from .formatting import duration, percent
from .render import render
from .summary import compare

_FILE = click.Path(dir_okay=False, path_type=Path)


class Refused(click.ClickException):
    """Invalid input, or a file that cannot be read or written: one line on stderr, and exit status 2."""

    exit_code = 2


@click.command()
@click.argument("record", type=_FILE)
@click.argument("other", type=_FILE, required=False)
@click.option("-o", "--output", type=_FILE, help="The page. Default: run.html for run.jsonl.")
@click.option(
    "--run", default=-1, show_default="the last", metavar="N", help="Which run, if RECORD contains several: 0, 1, …"
)
@click.option("--goodput", "only_goodput", is_flag=True, help="Print where the time went, and write no page.")
def report(record: Path, other: Path | None, output: Path | None, run: int, only_goodput: bool) -> None:
    """Write a page on a recorded run: how long it took, what changed and why, and where the time went.

    RECORD is a file written by `program.run(record="run.jsonl")`. The page is one HTML file that needs no network.
    With OTHER, print what differs between the two runs, and write no page.
    """
    try:
        columns = Columns(record, run)
        if other is not None:
            click.echo(_in_lines([("", str(record), str(other)), *compare((columns, Columns(other, run)))]))
        elif only_goodput:
            click.echo(f"{record.name}: {as_table(columns.ledger)}")
        else:
            output, page = output or record.with_suffix(".html"), render(columns, record.name)
            if output.exists() and output.samefile(record):
                raise RecordError(f"{output}: the page would overwrite the record. Choose another file:  -o run.html")
            output.write_text(page, encoding="utf-8")
            click.echo(f"{output}: {counted(len(columns), 'step')}, {len(page.encode()) / 1e6:.1f} MB")
    except ImportError as error:
        raise Refused("the report needs bokeh and jinja2:  pip install 'adaptive-dataflow[plot]'") from error
    except (RecordError, OSError) as error:
        raise Refused(str(error)) from error


def _in_lines(found: list[tuple[str, str, str]]) -> str:
    wide = max(len(what) for what, *_ in found) + 2
    return "\n".join(f"{what:<{wide}}{first} → {second}" for what, first, second in found)


def as_table(ledger: Ledger) -> str:
    """Return seconds by cause as text, the productive ones first, then the costliest; none below a millisecond."""
    counts = {
        "step": ledger.steps,
        "start": ledger.starts,
        "restore": ledger.restores,
        "repeated step": ledger.repeated,
    }
    total = ", ".join([duration(ledger.wall), *(counted(count, what) for what, count in counts.items() if count)])
    lines = [
        f"{name:<22}{'−' * (s < 0) + duration(abs(s)):>12}{percent(abs(s) / ledger.wall):>8}   {CAUSES[name]}"
        for name, s in ledger.by_rank()
        if abs(s) >= 1e-3
    ]
    return "\n".join([total, "", *lines, f"{'goodput':<22}{percent(ledger.goodput):>20}"])
