"""The command `adaptive report`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from adaptive.base.errors import RecordError


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The report. Default: beside the record, run.html for run.jsonl.",
)
@click.option(
    "--run", default=-1, show_default="the last", metavar="N", help="Which run, if RECORD contains several: 0, 1, …"
)
def report(record: Path, output: Path | None, run: int) -> None:
    """Write an HTML report of a recorded run: what changed, when and why, and where the time went.

    RECORD is a file written by `program.run(record="run.jsonl")`. The report is one HTML file that needs no network.
    """
    output = output or record.with_suffix(".html")
    with one_line_errors(record):
        _make(record, output, run)


class Refused(click.ClickException):
    """Invalid input, or a file that cannot be written: one line on stderr, and exit status 2."""

    exit_code = 2


@contextmanager
def one_line_errors(record: Path) -> Iterator[None]:
    """Report a record that cannot be read in one line, within the block.

    Raises:
      Refused: the file is not a record, or cannot be read.
    """
    try:
        yield
    except RecordError as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(f"{record}: {error.strerror or error}.") from error


def _make(record: Path, output: Path, run: int) -> None:
    if record.exists() and output.exists() and output.samefile(record):
        raise Refused(f"{output}: the report would overwrite the record. Choose another file:  -o run.html")
    if output.is_dir():
        raise Refused(f"{output} is a directory. Choose a file:  -o {output / record.with_suffix('.html').name}")
    if not output.resolve().parent.is_dir():
        raise Refused(f"{output}: the directory {output.parent} does not exist.")
    from .charts import Missing
    from .columns import read_columns
    from .render import render, write

    columns = read_columns(record, run)
    try:
        text = render(columns, record.name, _version())
    except Missing as error:
        raise Refused(str(error)) from error
    try:
        write(text, output)
    except OSError as error:
        raise Refused(f"{output}: {error.strerror or error}.") from error
    click.echo(f"{output}: {len(columns):,} steps, {len(text.encode()) / 1e6:.1f} MB")


def _version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("adaptive-dataflow")
    except PackageNotFoundError:
        return "from source"
