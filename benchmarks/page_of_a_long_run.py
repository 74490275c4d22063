"""The report of 100,000 steps of 64 workers is made in at most 5 s, has at most 3 MB, and opens within 2 s.

    python benchmarks/page_of_a_long_run.py [--steps 100000] [--workers 64] [--keep FOLDER]

The recorder of real runs writes a synthetic run: workers that differ by 5 %, one that is slow for a fifth of the run,
eight that are slow for a twentieth, slow input for a twentieth, sizes that change every 500 steps, a lost worker and
its replacement. Then the process of `adaptive report` is timed from start to end, and headless Chromium (if it is
installed) from the start of navigation until all charts are drawn.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _measure import readable, report

from adaptive.base.activity import Breakdown, WorkerSeconds
from adaptive.base.decision import Decision, Limits
from adaptive.base.world import Loss
from adaptive.control.membership import Numbers
from adaptive.control.requests import Request
from adaptive.observe.events import Asked, HookValues, StepEvent
from adaptive.observe.origin import RunOrigin
from adaptive.observe.record import JSONL
from adaptive.observe.report import Report

EXAMPLE_SECONDS = 0.9e-3
CHANGES_EVERY = 500
START = 1.7e9  # seconds since 1970
ROUNDS = 3
NOISE = ("scale", "trace", "signal", "lower", "upper")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRAWN = re.compile(r'data-drawn-ms="(\d+)"')


def write_record(path: Path, steps: int, workers: int, seed: int = 0) -> None:
    """Write a run as `Program.run(record=…)` would have recorded it."""
    rng = np.random.default_rng(seed)
    record, loss = JSONL(path), 2.3
    limits = Limits((1,) * workers, (10**6,) * workers, 4, examples=10**6)
    speed = rng.normal(1.0, 0.05, workers)
    even = np.round(32 / speed).astype(int)
    sizes = previous = tuple(map(int, even))
    members = tuple(range(workers))
    consumed, requests, now = 0, (), START + 6.0
    origin = RunOrigin(START, START + 4.0, now, [f"node{i}" for i in range(workers // 8)], {"global_batch": sum(sizes)})
    for step in range(1, steps + 1):
        at = step / steps
        slow = speed.copy()
        slow[workers // 4] *= 1.6 if 0.4 <= at < 0.6 else 1.0
        slow[workers // 2 : workers // 2 + workers // 8] *= 1.4 if 0.7 <= at < 0.75 else 1.0
        left, came = step == int(0.80 * steps), step == int(0.82 * steps)
        if left or came:
            members = tuple(w for w in range(workers) if came or w != workers - 1)
        there = np.isin(np.arange(workers), members)
        previous, sizes = sizes, tuple(int(size) for size in np.where(there, np.where(sizes, sizes, even), 0))
        input_ = np.where(there, rng.exponential(12e-3 if 0.2 <= at < 0.25 else 5e-5, workers), 0.0)
        computing = np.array(sizes) * EXAMPLE_SECONDS * slow * rng.lognormal(0, 0.03, workers)
        busy = np.where(there, computing + input_ + 4e-4, 0.0)
        of_workers = WorkerSeconds(input_, computing, busy, np.where(there, busy.max() - busy, 0.0))
        compiling = 8.0 if step == 1 else 0.0
        parts = (input_[0], computing[0], 2e-3, busy.max() - busy[0], 1e-4, compiling, 3e-4)
        consumed, now = consumed + sum(sizes), now + sum(parts)
        loss = 0.05 + 2.25 * np.exp(-6 * at) + rng.normal(0, 0.02)
        scale = float(200 + 4000 * at + rng.normal(0, 80))
        decision, notes, requests = None, [], ()
        if step % CHANGES_EVERY == 0:
            shares = even + np.roll(trade := rng.integers(-1, 2, workers), 1) - trade  # the global batch stays
            decision = Decision(shares=tuple(map(float, shares)), notes=())
            following = tuple(map(int, shares))
            requests = (Request("balance", step, decision),)
        hooks = (
            HookValues("0/adapt_batch_size", 20, tuple(f"noise.{field}" for field in NOISE),
                       [np.array(x) for x in (scale, 20.0, 0.1, scale * 0.8, scale * 1.3)]),
            HookValues("1/balance", CHANGES_EVERY, ("seconds",), [computing.astype(np.float32)]),
        )  # fmt: skip
        told = Report(
            step, consumed // 10**6, consumed, {"loss": np.array(loss), "noise": np.array(scale)}, sizes, sum(sizes), 1,
            312_000, float(sum(parts)), Breakdown(*map(float, parts)), (), (), 8, 4.0, 8.0, decision, step % 9973 == 0,
            tuple(notes), members, (workers - 1,) if came else (),
            (Loss((workers - 1,), f"rank {workers - 1}", f"message 1 of step {step}", 0.01),) if left else (),
        )  # fmt: skip
        asked = Asked(sum(sizes), members, Numbers(len(members), 1, workers))
        record.write(StepEvent(told, consumed / 10**6, previous, limits, seed, hooks, asked,
                         ("balance",) if decision else (), of_workers, requests, "a", False, now, {},
                         origin if step == 1 else None))  # fmt: skip
        if decision is not None:
            sizes = following
    record.close()


def made(record: Path, page: Path) -> tuple[float, float]:
    """Return the seconds of the command's process, and its processor time, on which other load has less effect."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = "from adaptive.html_report.command import report; report()"
    subprocess.run([sys.executable, "-c", command, str(record), "-o", str(page)], check=True, capture_output=True)
    took, behind = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, behind.ru_utime + behind.ru_stime - before.ru_utime - before.ru_stime


def opened(page: Path) -> float | None:
    """Return the seconds in a browser from the start of navigation until the charts are drawn; `None` without a
    browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return None
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--window-size=1280,900",
        ]
        done = subprocess.run(
            [browser, *options, "--virtual-time-budget=20000", "--dump-dom", page.as_uri()],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
    found = DRAWN.search(done.stdout)
    return int(found[1]) / 1e3 if found else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave record and page there; take a record from there"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record, page = (Path(args.keep or folder) / name for name in ("run.jsonl", "run.html"))
        if not record.exists():
            write_record(record, args.steps, args.workers)
        making = [made(record, page) for _ in range(ROUNDS)]
        opening = [seconds for _ in range(ROUNDS) if (seconds := opened(page)) is not None]
        rows = [
            {"": "the record", "figure": f"{record.stat().st_size / 1e6:.0f} MB", "aimed at": ""},
            {
                "": "making the page",
                "figure": readable(float(np.median([took for took, _ in making]))),
                "aimed at": "5 s",
            },
            {
                "": "… processor time",
                "figure": readable(float(np.median([used for _, used in making]))),
                "aimed at": "",
            },
            {"": "the page", "figure": f"{page.stat().st_size / 1e6:.2f} MB", "aimed at": "3 MB"},
            {
                "": "opening it",
                "figure": readable(float(np.median(opening))) if opening else "no browser here",
                "aimed at": "2 s",
            },
        ]
    notes = [
        f"{args.steps} steps of {args.workers} workers; medians of {ROUNDS}. {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.0f} at the end, of which this is 1."
    ]
    report("The report of a long run", rows, "page_of_a_long_run.md", notes)


if __name__ == "__main__":
    main()
