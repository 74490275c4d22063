"""Strategies on links between hosts, as `adaptive simulate --link` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import collectives.strategies as sync

from . import _scenarios
from ._scenarios import scenario
from ._simulation import Hooked
from ._strategies import LINKS, advice, costs, default_strategies, rows_of_links, rows_of_one_link
from ._tables import aligned, compare


def tables_on_links(
    links: Sequence[str],
    scenarios: Sequence[str],
    policies: dict[str, Hooked],
    workers: int,
    steps: int,
    seed: int,
    *,
    hosts: int | None,
    parameters: float,
    latency: float,
    compute: float | None,
    strategies: Sequence[str],
) -> Iterator[str]:
    """Yield what strategies cost on links, a table for each scenario and policy.

    Args:
      links: rates, or "all".
      scenarios: names, or "all"; none with `compute`.
      policies: that divide the batch, by name.
      workers, steps, seed: of the scenarios.
      hosts: number of hosts; `None`: each worker is on its own.
      parameters: number of the model's parameters.
      latency: seconds of a small message.
      compute: seconds of a local step, instead of a scenario.
      strategies: names; by default those of `default_strategies`.

    Raises:
      ValueError: a name or a number is not valid, or there is neither a scenario nor `compute`, or both.
    """
    hosts = workers if hosts is None else hosts
    if workers % hosts:
        raise ValueError(f"--workers {workers} are not equally many on --hosts {hosts}.")
    if bool(scenarios) == (compute is not None):
        raise ValueError("give a scenario (see --list), or the seconds of a local step:  --compute 0.5")
    rates = LINKS if list(links) == ["all"] else links
    there = {"hosts": hosts, "workers_per_host": workers // hosts}
    names = strategies or default_strategies(workers // hosts)
    size = f"{workers} workers on {hosts} hosts, {parameters:,.0f} parameters, {', '.join(rates)}"
    for about, seconds in _computing(scenarios, policies, workers, steps, seed, compute):
        by_link = {rate: costs(names, parameters, sync.Link(rate, latency), compute=seconds, **there) for rate in rates}
        if len(rates) == 1:
            found = by_link[rates[0]]
            exact = costs(["synchronous"], parameters, sync.Link(rates[0], latency), compute=seconds, **there)
            text = "\n\n".join(filter(None, [aligned(rows_of_one_link(found, *exact.values())), advice(found)]))
        else:
            text = aligned(rows_of_links(by_link))
        yield f"{about}, {size}\n\n{text}"


def _computing(
    scenarios: Sequence[str],
    policies: dict[str, Hooked],
    workers: int,
    steps: int,
    seed: int,
    compute: float | None,
) -> Iterator[tuple[str, Any]]:
    """Yield a title, and the seconds that workers compute; shape=() or (steps, workers)."""
    if compute is not None:
        yield f"{compute:g} s of computing in a local step", compute
        return
    for name in _scenarios.names() if list(scenarios) == ["all"] else scenarios:
        case = scenario(name, workers, steps, seed)
        for policy, run in compare(case, policies, steps, seed).items():
            yield f"{name}, {policy}", run.seconds
