"""Shared by the benchmark scripts: timing in alternation, ratios with their spread, results as text, a busy neighbor.

The speed of a shared machine drifts by more than the differences to be measured. So the candidates run in turn in one
process and are compared round by round: drift that is slower than a round cancels in the *paired* ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


# --- timing -----------------------------------------------------------------------------------------------------------


def alternate(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Time several calls in turn.

    Each round calls each candidate once. The next round starts one further on, so that none always goes first. The
    order depends on nothing else, so MPI ranks that all run this stay in step.

    Args:
      calls: by name. The clock stops when the result is ready (`jax.block_until_ready`).
      rounds: number of timed rounds.
      warmup: number of rounds before those.
      clock: returns seconds. With `time.process_time`, other processes on the machine matter less.

    Returns:
      For each name the seconds of its calls, one per round.
    """
    names = list(calls)
    seconds = {name: np.empty(rounds) for name in names}
    for r in range(-warmup, rounds):
        for i in range(len(names)):
            name = names[(r + i) % len(names)]
            start = clock()
            jax.block_until_ready(calls[name]())
            elapsed = clock() - start
            if r >= 0:
                seconds[name][r] = elapsed
    return seconds


def slowest(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Time several calls in turn on all MPI ranks, and return the seconds of the slowest rank, round by round."""
    from mpi4py import MPI

    def with_barrier(call: Callable[[], Any]) -> None:
        call()
        MPI.COMM_WORLD.Barrier()  # so the next starts on all ranks at once

    own = alternate({name: partial(with_barrier, call) for name, call in calls.items()}, rounds)
    return {name: np.max(MPI.COMM_WORLD.allgather(seconds), axis=0) for name, seconds in own.items()}


class Spread(NamedTuple):
    """The median of a sample, and its 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, sample: Sequence[float] | np.ndarray) -> Spread:
        """Return the median and the 10th and 90th percentile of a sample."""
        return cls(*(float(q) for q in np.percentile(sample, [50, 10, 90])))


@dataclass(frozen=True)
class Summary:
    """The seconds of one candidate, and their ratio to the baseline's (below 1 is faster)."""

    name: str
    seconds: Spread
    ratio_of_medians: float
    paired_ratio: Spread  # of the ratios round by round

    def cells(self) -> dict[str, str]:
        """Return one row of a table."""
        s, r = self.seconds, self.paired_ratio
        return {
            "": self.name,
            "median": readable(s.median),
            "p10 – p90": f"{readable(s.p10)} – {readable(s.p90)}",
            "ratio of medians": f"{self.ratio_of_medians:.3f}",
            "paired ratio (p10 – p90)": f"{r.median:.3f} ({r.p10:.3f} – {r.p90:.3f})",
        }


def summary(samples: Mapping[str, Sequence[float] | np.ndarray], baseline: str | None = None) -> list[Summary]:
    """Compare what `alternate` measured with `baseline`, by default the first candidate."""
    reference = np.asarray(samples[baseline if baseline is not None else next(iter(samples))])
    rows = []
    for name, sample in samples.items():
        ratio = float(np.median(sample) / np.median(reference))
        rows.append(Summary(name, Spread.of(sample), ratio, Spread.of(np.asarray(sample) / reference)))
    return rows


def rows_beside(samples: Mapping[str, np.ndarray], base: str, column: str, **first: object) -> list[dict[str, object]]:
    """Return cells of `summary`, between those of `first` and a `column` with the median seconds beyond `base`'s."""
    beyond = {name: readable(float(np.median(seconds - samples[base]))) for name, seconds in samples.items()}
    return [{**first, **row.cells(), column: beyond[row.name]} for row in summary(samples)]


def readable(seconds: float) -> str:
    """Format seconds with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            digits = 2 - int(np.log10(abs(seconds) / size))
            return f"{seconds / size:.{max(digits, 0)}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


# --- the command ------------------------------------------------------------------------------------------------------


def command_line(doc: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of a script's options, with `--write`, whose value is the name of the result's file, or None.

    Args:
      doc: the script's docstring.
      **options: by name the default, or the default and a help text. None is the default of a text, False of a flag.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result = f"{Path(sys.argv[0]).stem}.md"
    made.add_argument("--write", action="store_const", const=result, help="write the result to benchmarks/results, too")
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"default": default}
        if default is not False and default is not None:
            kind["type"] = type(default)
        made.add_argument(f"--{name.replace('_', '-')}", help=text, **kind)
    return made


# --- results ----------------------------------------------------------------------------------------------------------


def report(
    title: str,
    rows: Iterable[Summary | Mapping[str, object]],
    path: str | Path | None = None,
    notes: Iterable[str] = (),
) -> str:
    """Print a result as Markdown, and write it to a file. Under MPI, one rank calls this.

    Args:
      title: the claim, as a sentence.
      rows: of the table: what `summary` returns, or cells by column.
      path: where to write; a name means a file in `benchmarks/results`. `None` prints only.
      notes: paragraphs below the table: what was run, and what the figures do not show.

    Returns:
      The text.
    """
    cells = [row.cells() if isinstance(row, Summary) else row for row in rows]
    paragraphs = [f"# {title}", table(cells), *notes, f"{machine()}; {date.today().isoformat()}, commit {commit()}"]
    text = "\n\n".join(paragraphs) + "\n"
    print(text, flush=True)
    if path is not None:
        file = RESULTS / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return text


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format Markdown that is readable as plain text too: columns are padded, and numbers are aligned to the right."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    body = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *body, strict=True)]
    rule = ["-" * max(widths[0], 3), *("-" * (max(w, 3) - 1) + ":" for w in widths[1:])]
    lines = [
        [cell.ljust(len(rule[0])) if i == 0 else cell.rjust(len(rule[i])) for i, cell in enumerate(line)]
        for line in (columns, rule, *body)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """Describe the machine and the versions of a measurement."""
    found = {package.name: package.version for package in distributions()}
    versions = ", ".join(f"{name} {found[name]}" for name in ("jax", "jaxlib", "numpy", "mpi4py") if name in found)
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, {versions}"


def commit() -> str:
    """Return the short name of the commit that is measured, with a `+` if files have changed since."""
    git = ["git", "-C", str(RESULTS.parent)]
    with suppress(OSError, subprocess.CalledProcessError):
        name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        return name + "+" * bool(subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True).strip())
    return "unknown"


def middle(values: Iterable[float], digits: int | None = 2, unit: str = "", unknown: str = "–") -> str:
    """Format the median of several seeds, with the least and most where they differ; "never" is infinity.

    NaNs are left out, and the others counted; `unknown` if there is none. By `digits=None` two digits matter.
    """
    array = np.asarray(list(values), np.float64)
    known = array[~np.isnan(array)]
    if not len(known):
        return unknown
    low, mid, high = (_number(value, digits) for value in (known.min(), np.median(known), known.max()))
    text = f"{mid}{unit}" if low == high else f"{mid}{unit} ({low} – {high})"
    return text + f", {len(known)} of {len(array)}" * (len(known) < len(array))


def _number(value: float, digits: int | None) -> str:
    if digits is None:
        return f"{value:,.0f}" if 10 <= value < 1e6 else f"{value:.2g}"
    return f"{value:.{digits}f}" if np.isfinite(value) else "never"


def sizes_text(sizes: Sequence[int] | np.ndarray) -> str:
    """Format batch sizes as `166+167+159+20`."""
    return "+".join(str(int(size)) for size in sizes)


# --- the machine (Linux) ----------------------------------------------------------------------------------------------


def pin(*cores: int) -> None:
    """Pin all present and future threads of this process to these cores."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), cores)


_SPIN = """
import os, sys
parent, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
print("spinning", flush=True)
while os.getppid() == parent:  # an orphan stops by itself, however its parent ended
    for _ in range(100_000):
        pass
"""


@contextmanager
def contention(core: int, processes: int = 1) -> Iterator[list[int]]:
    """Run `processes` processes that spin on `core` during the `with` block.

    A process pinned there beside n of them gets 1 / (n + 1) of the core. They end with the block, and also when this
    process is killed. Yields their process ids.
    """
    children: list[subprocess.Popen[str]] = []
    try:
        children.extend(_spinner(core) for _ in range(processes))
        for child in children:
            assert child.stdout is not None
            if not child.stdout.readline():
                raise OSError(f"cannot run on core {core}; this process may use {sorted(os.sched_getaffinity(0))}")
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.communicate()


def _spinner(core: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SPIN, str(os.getpid()), str(core)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
