"""Render the report of a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .about import about
from .canvas import Chart, Missing, embedded, library
from .charts import charts
from .columns import Columns
from .comparison import RunDifference, chart
from .events import hook_summary, run_events
from .findings import findings, medians, speed, where_it_went
from .formatting import counted, duration, listed, number, percent
from .worker_charts import worker_shares

_FINDINGS = 8  # further findings are folded
_CHANGES = 15
_METRICS = 4  # largest number of metrics in the headline
_NO_BREAKDOWN = "seconds by cause and by worker (so the report has nothing on waiting, input and exchange)"


class Table(NamedTuple):
    """The table below a chart."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(run: Columns, name: str, version: str, refresh: float = 0.0) -> str:
    """Return the report of a run as HTML without external resources.

    Args:
      run: the run.
      name: the file name of its record.
      version: the version of this library.
      refresh: seconds after which a browser loads the report again; 0: never.

    Raises:
      Missing: jinja2 or bokeh is not installed.
    """
    made = charts(run)
    script, elements = embedded(made)
    found = findings(run)
    lines, left_out = run_events(run)
    return _template("report.html.jinja").render(
        refresh=refresh,
        about=about(run),
        title=f"Run of {counted(len(run), 'step')}: {name}",
        version=version,
        style=_raw(_text("report.css")),
        lead=_lead(run),
        figures=_figures(run),
        went=_went(run),
        lacks=_lacks(run),
        findings=[{"text": finding.text, "cost": f"≈ {duration(finding.seconds)}"} for finding in found],
        shown_findings=_FINDINGS,
        nothing_found=_nothing(run),
        changes=[
            {
                "step": f"{run.step[change.row]:,}",
                "after": duration(float(run.elapsed[change.row])),
                "kind": change.kind,
                "what": change.what,
                "why": change.why,
            }
            for change in lines
        ],
        shown_changes=_CHANGES,
        left_out=left_out,
        hook_summary=hook_summary(run),
        charts=made,
        elements=elements,
        tables=_tables(run, made),
        library=library(),
        script=script,
        behaviour=_text("report.js"),
        source=f"Made by adaptive-dataflow {version} from {name}. Durations are the time in steps, on "
        "the process that recorded the run.",
    )


def render_comparison(runs: tuple[Columns, Columns], names: tuple[str, str], found: Sequence[RunDifference]) -> str:
    """Return the comparison of two runs as HTML without external resources.

    Args:
      runs: the runs.
      names: what they are called.
      found: their differences.

    Raises:
      Missing: jinja2 or bokeh is not installed.
    """
    made = chart(runs, names)
    script, elements = embedded([made])
    return _template("comparison.html.jinja").render(
        title=f"{names[0]} and {names[1]}",
        style=_raw(_text("report.css")),
        names=names,
        differences=found,
        chart=made,
        element=elements[made.name],
        library=library(),
        script=script,
        behaviour=_text("report.js"),
    )


def _template(name: str) -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise Missing(
            "the report needs jinja2, which is not installed:  pip install 'adaptive-dataflow[plot]'"
        ) from error
    return Environment(autoescape=True, trim_blocks=False, undefined=StrictUndefined).from_string(_text(name))


def _text(name: str) -> str:
    return files("adaptive.html_report").joinpath(name).read_text(encoding="utf-8")


def _raw(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)  # text of this package only, never of a record


# --- the headline -----------------------------------------------------------------------------------------------------


def _lead(run: Columns) -> str:
    first, last = run.step[0], run.step[-1]
    there = run.members[-1][1] if run.members else tuple(range(run.n))
    of = f" of at most {run.n}" if len(there) < run.n else ""
    epochs = number(round(float(run.epoch[-1]), 1))
    return (
        f"Steps {first:,} to {last:,} took {duration(float(run.elapsed[-1]))} and {run.examples[-1]:,} examples, up to "
        f"epoch {epochs}: {speed(run)} examples a second. At the end there were {counted(len(there), 'worker')}{of}, "
        f"and a global batch of {run.changed[-1].sum():,}."
    )


def _figures(run: Columns) -> list[tuple[str, str, str]]:
    seconds = run.seconds
    few, many = np.percentile(seconds, [10, 90])
    totals = run.changed.sum(1)
    through = f"from {totals.min():,} to {totals.max():,}" if totals.min() < totals.max() else "throughout"
    counts = [len(members) for _, members in run.members] or [run.n]
    skipped = int(run.skipped.sum())
    rows = [
        ("time in steps", duration(float(run.elapsed[-1])), counted(len(run), "step")),
        (
            "median step",
            duration(float(np.median(seconds))),
            f"{duration(float(few))} to {duration(float(many))} (p10, p90)",
        ),
        ("examples a second", speed(run), ""),
        ("epochs", number(round(float(run.epoch[-1]), 2)), ""),
        (
            "workers",
            f"{counts[-1]}",
            f"from {min(counts)} to {max(counts)}" if min(counts) < max(counts) else "throughout",
        ),
        ("global batch", f"{totals[-1]:,}", through),
    ]
    if run.restored:
        repeated, restores = (sum(getattr(r, name) for r in run.restored) for name in ("repeated", "restores"))
        rows.append(("repeated steps", f"{repeated:,}", f"in {counted(restores, 'restore')}"))
    if skipped:
        rows.append(("skipped steps", f"{skipped:,}", percent(skipped / len(run))))
    for name, values in list(run.metrics.items())[:_METRICS]:
        known = np.flatnonzero(np.isfinite(values))
        last = number(float(values[-1]))
        more = "" if not len(known) or known[-1] == len(values) - 1 else f"last {number(float(values[known[-1]]))}"
        rows.append((f"{name}, at the end", last, more))
    return rows


def _went(run: Columns) -> str:
    went = where_it_went(run)
    return f"Of the time in steps, {went}." if went else ""


def _lacks(run: Columns) -> list[str]:
    """Return a sentence on the data that an older record lacks, or an empty list."""
    missing = []
    if run.breakdown is None:
        missing.append(_NO_BREAKDOWN)
    if not run.metrics:
        missing.append("metrics" if run.breakdown is None else "metrics that are single numbers")
    return [f"This record does not contain {listed(missing)}."] if missing else []


def _nothing(run: Columns) -> str:
    if run.breakdown is None:
        return "No single step took long. The record contains nothing more on durations."
    return (
        "None that cost a hundredth of the run: neither workers nor input nor the compiler kept steps waiting for long."
    )


# --- the numbers behind the charts ------------------------------------------------------------------------------------


def _tables(run: Columns, made: Sequence[Chart]) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    names = {chart.name for chart in made}
    if run.breakdown is not None:
        tables["seconds"] = _of_parts(run)
    if "workers" in names:
        tables["workers"] = _of_workers(run)
    if "sizes" in names:
        tables["sizes"] = _of_sizes(run)
    for place, (name, values) in enumerate(run.metrics.items()):
        if f"metric-{place}" in names:
            tables[f"metric-{place}"] = _of_metric(run, name, values)
    return tables


def _of_parts(run: Columns) -> Table:
    assert run.breakdown is not None
    totals = run.breakdown.sum(0, dtype=np.float64)
    per_step = np.median(run.breakdown, axis=0)
    rows = [
        (part, duration(total), percent(total / max(totals.sum(), 1e-9)), duration(float(middle)))
        for part, total, middle in zip(run.parts, map(float, totals), per_step, strict=True)
    ]
    return Table(("cause", "total", "share", "median step"), sorted(rows, key=lambda r: -totals[run.parts.index(r[0])]))


def _of_workers(run: Columns) -> Table:
    shares = worker_shares(run)
    some = slice(None, None, max(1, len(run) // 20_000))
    size = np.where(run.sizes[some] > 0, run.sizes[some], np.nan)
    an_example = medians(run.workers["computing"][some] / size, 0)
    examples = run.changed.T @ np.diff(np.append(run.changes, len(run)))
    rows = [
        (
            f"worker {w}",
            *(percent(float(share[w])) if np.isfinite(share[w]) else "–" for share in shares.values()),
            duration(float(an_example[w])) if np.isfinite(an_example[w]) else "–",
            f"{examples[w]:,}",
        )
        for w in range(run.n)
    ]
    return Table(("worker", "computing", "input", "other", "waiting", "median per example", "examples"), rows)


def _of_sizes(run: Columns) -> Table:
    rows = []
    for w in range(run.n):
        there = run.changed[:, w][run.changed[:, w] > 0]
        ends = (f"{run.changed[0, w]:,}", f"{run.changed[-1, w]:,}")
        bounds = (f"{there.min():,}", f"{there.max():,}") if len(there) else ("–", "–")
        rows.append((f"worker {w}", *ends, *bounds))
    return Table(("worker", "first", "last", "least", "most"), rows)


def _of_metric(run: Columns, name: str, values: np.ndarray) -> Table:
    """Tabulate a metric at ten steps of the run."""
    places = np.unique(np.linspace(0, len(run) - 1, min(len(run), 10)).round().astype(int))
    rows = [
        (f"{run.step[row]:,}", number(float(run.epoch[row].round(2))), number(float(values[row]))) for row in places
    ]
    return Table(("step", "epoch", name), rows)


def write(text: str, path: Path) -> None:
    """Write the report atomically: a reader sees the old file or the new one."""
    if path.exists() and not path.is_file():  # /dev/stdout or a pipe, which no file can replace
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
