"""Render the report of a run as one HTML file without external resources."""

from __future__ import annotations

from importlib.resources import files

from adaptive.observe.ledger import CAUSES
from adaptive.observe.scalars import counted

from .charts import PARTS, charts, embedded
from .columns import Columns
from .events import hook_summary, run_events
from .findings import findings
from .formatting import duration, percent
from .summary import about, figures, last_values

_FINDINGS = 3
_LISTED = 200  # changes; more are in the record
_METRICS = 3  # of the driver, and logged ones, in the headline


def render(run: Columns, name: str) -> str:
    """Return the report of a run, whose record has this file name. Raises an ImportError without jinja2 or bokeh."""
    from jinja2 import Environment

    drawn = charts(run)
    page = files("adaptive.html_report")
    environment = Environment(autoescape=True)
    environment.filters |= {"duration": duration, "percent": percent}
    template = environment.from_string(page.joinpath("report.html.jinja").read_text("utf-8"))
    events = run_events(run)
    return template.render(
        charts=drawn,
        **embedded(drawn),
        style=page.joinpath("report.css").read_text("utf-8"),
        title=f"Run of {counted(len(run), 'step')}: {name}",
        lead=f"The run took {duration(run.ledger.wall)}. {percent(run.ledger.goodput)} of it was training.",
        figures=figures(run) + [(name, value, "at the end") for name, value in last_values(run, most=_METRICS).items()],
        findings=findings(run)[:_FINDINGS],
        changes=[(f"{run.step[event.row]:,}", float(run.elapsed[event.row]), event) for event in events[:_LISTED]],
        left_out=max(len(events) - _LISTED, 0),
        hooks=hook_summary(run),
        ledger=run.ledger,
        colors=PARTS,
        meanings=CAUSES,
        about=about(run),
    )
