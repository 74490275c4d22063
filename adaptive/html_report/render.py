"""Render the report of a run as one HTML file without external resources."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from adaptive.observe.ledger import CAUSES
from adaptive.observe.scalars import counted

from .charts import PARTS, charts, embedded
from .columns import Columns
from .comparison import about
from .events import hook_summary, run_events
from .findings import findings
from .formatting import duration, number, percent

_FINDINGS = 3
_LISTED = 200  # changes; more are in the record
_METRICS = 3  # in the headline


class Missing(RuntimeError):
    """A library that the report needs is not installed."""


def render(run: Columns, name: str) -> str:
    """Return the report of a run.

    Args:
      run: the run.
      name: the file name of its record.

    Raises:
      Missing: jinja2 or bokeh is not installed.
    """
    try:
        from jinja2 import Environment

        drawn = charts(run)
    except ImportError as error:
        raise Missing("the report needs bokeh and jinja2:  pip install 'adaptive-dataflow[plot]'") from error
    page = files("adaptive.html_report")
    template = Environment(autoescape=True).from_string(page.joinpath("report.html.jinja").read_text("utf-8"))
    events = run_events(run)
    return template.render(
        charts=drawn,
        **embedded(drawn),
        style=page.joinpath("report.css").read_text("utf-8"),
        title=f"Run of {counted(len(run), 'step')}: {name}",
        lead=f"The run took {duration(run.ledger.wall)}. {percent(run.ledger.goodput)} of it was training.",
        figures=_figures(run),
        findings=[(each.text, f"≈ {duration(each.seconds)}") for each in findings(run)[:_FINDINGS]],
        changes=[(f"{run.step[e.row]:,}", duration(float(run.elapsed[e.row])), e) for e in events[:_LISTED]],
        left_out=max(len(events) - _LISTED, 0),
        hooks=hook_summary(run),
        causes=_causes(run),
        about=about(run),
    )


def _causes(run: Columns) -> list[tuple[str, str, str, float, str | None, str]]:
    """Return each cause with its seconds, its share, the width and the color of its bar, and its meaning."""
    total, found = run.ledger.wall, []
    for name, s in run.ledger.by_rank():
        if abs(s) >= 0.0005 * total:
            share = abs(s) / total
            found.append(
                (name, duration(abs(s)), percent(share), max(100 * s / total, 0.0), PARTS.get(name), CAUSES[name])
            )
    return found


def _figures(run: Columns) -> list[tuple[str, str, str]]:
    """Return the key figures: name, value, and a second value or a range."""
    ledger = run.ledger
    few, many = np.percentile(run.seconds, [10, 90])
    active = (run.sizes > 0).sum(1)
    rate = float(f"{run.examples[-1] / max(run.elapsed[-1], 1e-9):.3g}")
    rows = [
        ("took", duration(ledger.wall), counted(max(ledger.starts, 1), "start")),
        ("training (goodput)", percent(ledger.goodput), "computing and exchanging"),
        ("median step", duration(float(np.median(run.seconds))), f"{duration(few)} to {duration(many)} (p10, p90)"),
        ("examples a second", number(rate), "in steps"),
        ("epochs", number(round(float(run.record["epoch"][-1]), 2)), f"{run.examples[-1]:,} examples"),
        ("workers", f"{active[-1]}", _range(active)),
        ("global batch", f"{run.global_batch[-1]:,}", _range(run.global_batch)),
    ]
    if ledger.restores:
        rows.append(("repeated steps", f"{ledger.repeated:,}", f"in {counted(ledger.restores, 'restore')}"))
    if skipped := int(run.skipped.sum()):
        rows.append(("skipped steps", f"{skipped:,}", percent(skipped / len(run))))
    rows += [(name, number(float(v[-1])), "at the end") for name, v in list(run.metrics.items())[:_METRICS]]
    for name, values in list(run.logged.items())[:_METRICS]:
        last = int(np.flatnonzero(values == values)[-1:].sum())
        rows.append((name, number(float(values[last])), f"at step {run.step[last]:,}"))
    return rows


def _range(values: np.ndarray) -> str:
    return f"from {values.min():,} to {values.max():,}" if values.min() < values.max() else "throughout"
