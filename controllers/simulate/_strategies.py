"""What synchronization strategies cost on links between hosts, with the seconds of simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
from numpy.typing import ArrayLike

import collectives as comm
import collectives.strategies as sync

from ._line_up import imported

STEPS = 100  # local steps in a round, by default
FRAGMENTS = 10
LINKS = ("10Mbit/s", "100Mbit/s", "1Gbit/s", "10Gbit/s", "100Gbit/s")
WAITING = 0.1  # share of a step that a strategy may wait for the link, and be recommended
GRAMMAR = f"""
\b
A strategy is
  NAME[,KEY=VALUE]…  a function of collectives.strategies and its options:
                     synchronous,wire=4bit   diloco,steps=50,wire=top_k
                     streamed,fragments=4    pair_averaging,schedule=ring
                     Rounds have steps={STEPS} by default. islands are hosts.
  MODULE:FUNCTION    yours: a function without arguments that makes a
                     collectives.strategies.Strategy
"""

# An optimizer's kind changes nothing that a host sends to others, unless islands span hosts.
_KEYS: dict[str, tuple[str, ...]] = {
    "synchronous": ("wire",),
    "model_averaging": ("wire",),
    "pair_averaging": ("schedule",),
    "local_steps": ("steps", "wire"),
    "diloco": ("steps", "wire"),
    "streamed": ("steps", "fragments", "wire"),
    "quorum": ("steps", "wire"),
    "islands": ("steps", "wire"),
}


def default_strategies(workers_per_host: int) -> list[str]:
    """Return names of strategies, from one that is exact in every step to those that send least.

    Args:
      workers_per_host: islands are named only where hosts have several workers.
    """
    names = ["synchronous", "synchronous,wire=bfloat16", "synchronous,wire=4bit"]
    if workers_per_host > 1:
        names += ["islands", "islands,wire=4bit"]
    names += ["diloco", "quorum", "streamed", "diloco,wire=4bit", "quorum,wire=4bit", "streamed,wire=4bit"]
    return [*names, "diloco,wire=2bit", "diloco,wire=top_k"]


def strategy_named(name: str, hosts: int, workers_per_host: int) -> sync.Strategy:
    """Return a strategy by its name on the command line.

    Args:
      name: see `GRAMMAR`.
      hosts: number of hosts, which are the islands.
      workers_per_host: number of workers on each host.

    Raises:
      ValueError: the name, an option or its value is unknown.
    """
    if ":" in name:
        return imported(name, sync.Strategy)
    kind, *given = name.split(",")
    if kind not in _KEYS:
        raise ValueError(f"no strategy is called {kind!r}; known are {', '.join(_KEYS)}, and MODULE:FUNCTION.")
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if key not in _KEYS[kind] or not equals:
            known = ", ".join(f"{key}=" for key in _KEYS[kind])
            raise ValueError(f"{name!r}: {text!r} is not an option of {kind}, which has {known}.")
        options[key] = _VALUES[key](name, value)
    return _make(kind, options, hosts, workers_per_host)


def costs(
    names: Sequence[str],
    parameters: float,
    link: sync.Link,
    *,
    hosts: int,
    workers_per_host: int,
    compute: ArrayLike,
) -> dict[str, sync.StepCost]:
    """Return the cost of a local step by strategy. See `collectives.strategies.step_cost`.

    Args:
      names: of strategies; see `GRAMMAR`.
      parameters, link, hosts, workers_per_host, compute: of `step_cost`.

    Raises:
      ValueError: a strategy is unknown.
    """
    there: dict[str, Any] = {"hosts": hosts, "workers_per_host": workers_per_host}
    return {
        name: sync.step_cost(strategy_named(name, **there), parameters, link, compute=compute, **there)
        for name in names
    }


def rows_of_one_link(found: Mapping[str, sync.StepCost], baseline: sync.StepCost) -> list[tuple[str, ...]]:
    """Return a table's rows: the cost of each strategy on one link.

    Args:
      found: costs by strategy.
      baseline: of `synchronous`, to which updates are compared.
    """
    head = ("strategy", "local step", "computing", "exchange", "hidden", "sent by a host", "updates")
    rows: list[tuple[str, ...]] = [head]
    for name, cost in found.items():
        ratio = baseline.seconds / cost.seconds if cost.seconds else 1.0
        cells = (_seconds(cost.seconds), f"{cost.computing:.0%}", _seconds(cost.exchange_seconds))
        rows.append((name, *cells, f"{cost.hidden:.0%}", _bytes(cost.bytes_between_hosts), f"{ratio:.3g}"))
    return rows


def rows_of_links(by_link: Mapping[str, Mapping[str, sync.StepCost]]) -> list[tuple[str, ...]]:
    """Return a table's rows: seconds of a local step of each strategy on each link.

    Args:
      by_link: costs by link and strategy.
    """
    rows: list[tuple[str, ...]] = [("strategy", *by_link)]
    names = next(iter(by_link.values()))
    return rows + [(name, *(_seconds(found[name].seconds) for found in by_link.values())) for name in names]


def advice(found: Mapping[str, sync.StepCost]) -> str:
    """Return which strategy is the first to wait little for the link, in the order given; "" if none computes."""
    if not any(cost.compute_seconds for cost in found.values()):
        return ""
    for name, cost in found.items():
        if 1 - cost.computing <= WAITING:
            return f"The first that computes at least {1 - WAITING:.0%} of the time: {name}"
    best = max(found, key=lambda name: found[name].computing)
    return f"None computes {1 - WAITING:.0%} of the time; most, {found[best].computing:.0%}: {best}"


def _make(kind: str, options: dict[str, Any], hosts: int, workers_per_host: int) -> sync.Strategy:
    optimizer = optax.sgd(1.0)
    if kind == "synchronous":
        sparse = not isinstance(options.get("wire", ""), str)
        return sync.synchronous(optimizer, **options, rounding="error_feedback" if sparse else "nearest")
    if kind in ("model_averaging", "pair_averaging"):
        return getattr(sync, kind)(optimizer, **options)
    steps = options.pop("steps", STEPS)
    if kind == "local_steps":
        return sync.local_steps(optimizer, steps, **options)
    if kind in ("diloco", "quorum"):
        return getattr(sync, kind)(optimizer, optimizer, steps, **options)
    if kind == "streamed":
        return sync.streamed(optimizer, optimizer, steps, options.pop("fragments", FRAGMENTS), **options)
    islands = [range(host * workers_per_host, (host + 1) * workers_per_host) for host in range(hosts)]
    return sync.islands(optimizer, optimizer, steps, islands, **options)


def _number(name: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"{name!r}: {value!r} is not a whole number.")
    return int(value)


_VALUES: dict[str, Callable[[str, str], Any]] = {
    "steps": _number,
    "fragments": _number,
    "schedule": lambda name, value: value,
    "wire": lambda name, value: comm.top_k(64) if value == "top_k" else value,
}


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if not seconds else f"{seconds * 1e6:.2g} µs"


def _bytes(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.3g} B"
