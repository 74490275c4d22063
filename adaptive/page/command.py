"""`adaptive report run.jsonl -o run.html`."""

from __future__ import annotations

from pathlib import Path

import click

from adaptive.base.errors import RecordError


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The page. By default beside the record: run.html for run.jsonl.",
)
@click.option(
    "--run", default=-1, show_default="the last", metavar="N", help="Which run, if RECORD holds several: 0, 1, …"
)
def report(record: Path, output: Path | None, run: int) -> None:
    """Make one page of a recorded run: what changed when and why, and where the time went.

    RECORD is the file that a program wrote with `program.run(record="run.jsonl")`. The page is one file that loads
    nothing from elsewhere: it can be mailed, and looked at without a network.
    """
    output = output or record.with_suffix(".html")
    try:
        _make(record, output, run)
    except RecordError as error:
        raise _Refused(str(error)) from error


class _Refused(click.ClickException):
    """Bad input, or what cannot be written: said in a line, and status 2."""

    exit_code = 2


def _make(record: Path, output: Path, run: int) -> None:
    if record.exists() and output.exists() and output.samefile(record):
        raise _Refused(f"{output}: the page would be written over the record. Name another file:  -o run.html")
    if output.is_dir():
        raise _Refused(f"{output}: is a folder. Name a file:  -o {output / record.with_suffix('.html').name}")
    if not output.resolve().parent.is_dir():
        raise _Refused(f"{output}: there is no folder {output.parent}.")
    from .charts import Missing
    from .columns import read_columns
    from .page import page, write

    try:
        columns = read_columns(record, run)
    except OSError as error:
        raise _Refused(f"{record}: {error.strerror or error}.") from error
    try:
        text = page(columns, record.name, _version())
    except Missing as error:
        raise _Refused(str(error)) from error
    try:
        write(text, output)
    except OSError as error:
        raise _Refused(f"{output}: {error.strerror or error}.") from error
    click.echo(f"{output}: {len(columns):,} steps, {len(text.encode()) / 1e6:.1f} MB")


def _version() -> str:
    """Of what is installed, or of the source beside."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("adaptive-dataflow")
    except PackageNotFoundError:
        return "from source"
