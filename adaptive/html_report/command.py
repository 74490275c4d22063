"""The command `adaptive report`."""

from __future__ import annotations

import time
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
@click.option(
    "--follow", is_flag=True, help="Rewrite the report while the run continues, until Ctrl-C; a browser reloads it."
)
@click.option(
    "--every",
    type=click.FloatRange(1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How often, with --follow.",
)
def report(record: Path, output: Path | None, run: int, follow: bool, every: float) -> None:
    """Write an HTML report of a recorded run: what changed, when and why, and where the time went.

    RECORD is a file written by `program.run(record="run.jsonl")`. The report is one HTML file that needs no network.
    """
    output = output or record.with_suffix(".html")
    with one_line_errors(record):
        if follow:
            _follow(record, output, run, every)
        else:
            _make(record, output, run)


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write an HTML page with a chart.")
def compare(first: Path, second: Path, output: Path | None) -> None:
    """Say what differs between two recorded runs, the last one of each file.

    FIRST and SECOND are files written by `program.run(record="run.jsonl")`.
    """
    for record in (first, second):
        if output is not None:
            _check_output(record, output)
    from .columns import read_columns
    from .comparison import compare as compare_runs
    from .comparison import in_words

    with one_line_errors(first):
        a = read_columns(first)
    with one_line_errors(second):
        b = read_columns(second)
    found = compare_runs(a, b)
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    click.echo(f"{names[0]} → {names[1]}\n\n{in_words(found)}")
    if output is not None:
        from .render import render_comparison, write

        with one_line_errors(output):
            write(render_comparison((a, b), names, found), output)
        click.echo(f"\n{output}")


class Refused(click.ClickException):
    """Invalid input, or a file that cannot be written: one line on stderr, and exit status 2."""

    exit_code = 2


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Report a file that cannot be read or written, or a library that is missing, in one line, within the block.

    Raises:
      Refused: the file is not a record, or cannot be read or written; or bokeh or jinja2 is not installed.
    """
    from .canvas import Missing

    try:
        yield
    except (RecordError, Missing) as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}.") from error


def _follow(record: Path, output: Path, run: int, every: float) -> None:
    """Write the report whenever the record has grown. After Ctrl-C, write it a last time, for reading at leisure."""
    size = -1
    try:
        while True:
            if (now := record.stat().st_size) != size:
                _make(record, output, run, refresh=every)
                size = now
            time.sleep(every)
    except KeyboardInterrupt:
        _make(record, output, run)


def _check_output(record: Path, output: Path) -> None:
    if record.exists() and output.exists() and output.samefile(record):
        raise Refused(f"{output}: the report would overwrite the record. Choose another file:  -o run.html")
    if output.is_dir():
        raise Refused(f"{output} is a directory. Choose a file:  -o {output / record.with_suffix('.html').name}")
    if not output.resolve().parent.is_dir():
        raise Refused(f"{output}: the directory {output.parent} does not exist.")


def _make(record: Path, output: Path, run: int, refresh: float = 0.0) -> None:
    _check_output(record, output)
    from .columns import read_columns
    from .render import render, write

    columns = read_columns(record, run)
    text = render(columns, record.name, _version(), refresh)
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
