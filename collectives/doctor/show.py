"""Printing an examination as text for the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .examine import Examination
from .facts import JobFacts
from .findings import describe_ranks, hosts, library
from .measure import ALL_BYTES, ExchangeTimes, Folder, LinkTimes

MOST_HOSTS = 32  # rows of a table


def show(found: Examination, console: Console | None = None) -> None:
    """Print an examination."""
    console = console or _console(in_job=bool(found.ranks[0].launcher))
    trial = found.trial
    console.print(Text(_title(found), style="bold"))
    _print_job(console, found, found.ranks[0].versions)
    if found.mpirun:
        console.print(_row("launcher", found.mpirun))
    if trial is not None:
        console.print(Text(f"\na job of {len(trial.ranks)} ranks, started by adaptive run", style="bold"))
        _print_job(console, trial, {})
    console.print()
    for finding in sorted(found.all_findings, key=lambda finding: finding.level, reverse=True):
        bad = finding.level == "wrong"
        console.print(Text("✗ " if bad else "· ", style="bold red" if bad else "yellow") + Text(finding.what))
        if finding.do:
            console.print(Text(indent(finding.do, "    "), style="cyan"), soft_wrap=True)  # to be copied
    console.print(_verdict(found))


def _console(in_job: bool) -> Console:
    """Return a console without colors: launchers give ranks a terminal even if their output goes to a file."""
    console = Console(highlight=False, force_terminal=False if in_job else None)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


def _print_job(console: Console, found: Examination, versions: Mapping[str, str]) -> None:
    if versions:
        said = ", ".join(f"{name} {text}" for name, text in {"python": found.ranks[0].python, **versions}.items())
        console.print(_row("versions", said))
    for name, text in _rows(found):
        console.print(_row(name, text))
    if len(found.ranks) > 1:
        console.print(Padding(_table(found.ranks), (0, 0, 0, 2)))


def _rows(found: Examination) -> Iterator[tuple[str, str]]:
    first = found.ranks[0]
    if first.library or first.launcher:
        by = f", started by {first.launcher}" if first.launcher else ""
        survives = "; continues when a rank dies" if first.survives else ""
        yield "MPI", f"{library(first) or 'none'}{by}{survives}"
    if len(found.ranks) == 1:
        yield "cores", f"{_cores(first)}{'' if first.quota is None else f', the time of {first.quota:g}'}"
        yield "devices", ", ".join(first.devices) or "none"
    if found.exchange is not None:
        yield from _between(found.links, found.exchange)
    if found.pairs:
        yield "host ↔ host", f"{_span([pair.bandwidth for pair in found.pairs], 1e-9, 'GB/s')}, each way at once"
    if len(hosts(found.ranks)) > 1 and found.links:
        far = max(found.links, key=lambda link: abs(link.offset))
        yield "clocks", f"at most {abs(far.offset) * 1e3:.2g} ms apart (rank {far.rank}; ± {far.within * 1e3:.1g} ms)"
    if found.folder is not None:
        yield "files", _files(found.folder, len(found.ranks))


def _between(links: Sequence[LinkTimes], together: ExchangeTimes) -> Iterator[tuple[str, str]]:
    latency, speed = [link.latency for link in links], [link.bandwidth for link in links]
    yield "rank 0 ↔ others", f"{_span(latency, 1e6, 'µs')}, {_span(speed, 1e-9, 'GB/s')}"
    small, large = f"{together.small * 1e6:.3g} µs", f"{together.large * 1e3:.3g} ms"
    yield "all ranks", f"Allreduce of 8 bytes {small}, of {ALL_BYTES >> 20} MiB {large}"


def _files(folder: Folder, ranks: int) -> str:
    seen = (
        f", not seen by {describe_ranks(folder.unseen)}"
        if folder.unseen
        else ", seen by all ranks"
        if ranks > 1
        else ""
    )
    return f"{folder.path}: {folder.kind or 'unknown file system'}, {folder.free / 1e9:.3g} GB free{seen}"


def _table(ranks: Sequence[JobFacts]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for name in ("host", "ranks", "cores", "threads", "devices"):
        table.add_column(name)
    shown = list(hosts(ranks).items())
    for host, there in shown[:MOST_HOSTS]:
        threads = sorted({own.threads or len(own.cpus) for own in there})
        devices = list(dict.fromkeys(name for own in there for name in own.devices))
        table.add_row(
            host,
            describe_ranks([own.rank for own in there]).split(" ", 1)[1],
            _shared([_cores(own) for own in there]),
            f"{'–'.join(map(str, dict.fromkeys((threads[0], threads[-1]))))} each",
            ", ".join(devices[:8]) + (", …" if len(devices) > 8 else ""),
        )
    if len(shown) > MOST_HOSTS:
        table.add_row(f"… {len(shown) - MOST_HOSTS} more hosts")
    return table


def _shared(cores: Sequence[str]) -> str:
    different = list(dict.fromkeys(cores))
    return " | ".join(different[:8]) + (" | …" if len(different) > 8 else "")


def _cores(own: JobFacts) -> str:
    first, last = own.cpus[0], own.cpus[-1]
    if len(own.cpus) == 1:
        return str(first)
    return f"{first}–{last}" if last - first == len(own.cpus) - 1 else f"{len(own.cpus)} of {first}–{last}"


def _span(values: Sequence[float], unit: float, name: str) -> str:
    low, high = f"{min(values) * unit:.3g}", f"{max(values) * unit:.3g}"
    return f"{low} {name}" if low == high else f"{low} to {high} {name}"


def _row(name: str, text: str) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_column(width=17, no_wrap=True, style="dim")
    row.add_column(overflow="fold")
    row.add_row(f"  {name}", Text(text))
    return row


def _title(found: Examination) -> str:
    ranks, there = len(found.ranks), hosts(found.ranks)
    first = found.ranks[0]
    if not first.launcher:
        return f"this process, on {first.host}"
    if first.trouble:
        return f"rank {first.rank} of {first.launched or '?'} on {first.host}, alone"
    return f"{ranks} rank{'s' * (ranks != 1)} on {len(there)} host{'s' * (len(there) != 1)}"


def _verdict(found: Examination) -> Text:
    wrong = [finding for finding in found.all_findings if finding.level == "wrong"]
    if not wrong:
        return Text("✓ no problems", style="bold green")
    return Text(f"{len(wrong)} problem{'s' * (len(wrong) > 1)}", style="bold red")
