"""The named policies of `adaptive simulate`, with the values that they read and how often they decide."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from controllers._policy import Policy, stateless
from controllers.policies.balance import balance
from controllers.policies.goodput import goodput_batch, goodput_workers
from controllers.policies.mitigate_slow_workers import mitigate_slow_workers
from controllers.policies.noise import noise_batch, noise_workers
from controllers.predictors.narx import narx
from controllers.published._lb_bsp import lb_bsp
from controllers.published._leader_straggler import leader_straggler
from controllers.published._proportional import proportional
from controllers.published._static import static_proportional

from ._simulation import SIGNALS, Hooked

SECONDS = ("seconds",)
MACHINE = ("seconds", "cpu_available", "memory_available")


class Contender(NamedTuple):
    """A policy to compare."""

    make: Callable[[], Policy]
    reads: tuple[str, ...]
    every: int
    about: str
    adapts: str = "split"  # what it changes: "split", "batch", "workers", or "members" (which workers take part)


def equal() -> Policy:
    """Return a policy that changes nothing."""
    return stateless(lambda observation: None, "equal")


LINE_UP = {
    "equal": Contender(equal, (), 1, "the initial split: equal sizes"),
    "balance": Contender(balance, SECONDS, 1, "ours: piecewise-linear times and an exact allocator"),
    "static": Contender(static_proportional, ("capacities",), 1, "Tyagi & Sharma, open loop: by data-sheet speeds"),
    "proportional": Contender(
        proportional, SECONDS, 1, "Tyagi & Sharma, closed loop, global batch kept; DBS and DLB are alike"
    ),
    "leader_straggler": Contender(leader_straggler, SECONDS, 1, "LB-BSP on accelerators: a few examples at a time"),
    "lb_bsp": Contender(
        lambda: lb_bsp(narx(), n_inputs=2, dead_band=0.0),
        MACHINE,
        1,
        "LB-BSP on processors: by speeds that NARX predicts",
    ),
    "noise_batch": Contender(
        noise_batch, ("noise_scale",), 20, "global batch by the noise scale (KungFu's rule)", "batch"
    ),
    "goodput_batch": Contender(
        goodput_batch,
        ("noise_scale", "seconds", "iteration_seconds"),
        20,
        "global batch by goodput (Pollux)",
        "batch",
    ),
    "noise_workers": Contender(
        lambda: noise_workers(128),
        ("noise_scale",),
        20,
        "number of workers by the noise scale (KungFu's Listing 1), 128 examples each",
        "workers",
    ),
    "goodput_workers": Contender(
        goodput_workers,
        ("noise_scale", "seconds", "iteration_seconds"),
        20,
        "number of workers and global batch by goodput (Pollux)",
        "workers",
    ),
    "mitigate_slow_workers": Contender(
        mitigate_slow_workers,
        SECONDS,
        1,
        "balance, and swaps of slow workers with the reserve (Falcon)",
        "members",
    ),
}


def hooked(name: str, reads: Sequence[str] | None = None) -> Hooked:
    """Return the hook for a policy given as `name`, `name@every` or `module:factory@every`.

    Args:
      name: a name from `LINE_UP`, or the module and name of a function without arguments that returns a `Policy`.
      reads: names of the values that the policy reads; by default those in `LINE_UP`, and the seconds for others.

    Raises:
      ValueError: there is no such policy or value, or the function does not return a policy.
    """
    plain, _, number = name.partition("@")
    if number and not (number.isdigit() and int(number) > 0):
        raise ValueError(f"{name!r}: after @, give the interval between decisions, in steps: an integer of at least 1.")
    if plain in LINE_UP:
        contender = LINE_UP[plain]
        policy, default_reads, every = contender.make(), contender.reads, contender.every
    elif ":" in plain:
        policy, default_reads, every = imported(plain), SECONDS, 1
    else:
        raise ValueError(f"no policy is called {plain!r}; known are {', '.join(LINE_UP)}. Or give module:factory.")
    for signal in reads or ():
        if signal not in SIGNALS:
            raise ValueError(f"no value is called {signal!r}; known are {', '.join(SIGNALS)}.")
    return Hooked(policy, default_reads if reads is None else tuple(reads), int(number) if number else every)


def imported(path: str) -> Policy:
    """Return a policy given as `module:name`, which names it or a function without arguments that makes it.

    Raises:
      ValueError: there is no such module or name, or it is not a policy and does not make one.
    """
    try:
        found: Any = pkgutil.resolve_name(path)
        made = found() if callable(found) else found
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path}: {error}. Is it on the path? (PYTHONPATH=.)") from error
    except TypeError as error:
        raise ValueError(f"{path}: {error}. It must take no arguments.") from error
    if not isinstance(made, Policy):
        raise ValueError(f"{path}: expected a controllers.Policy, or a function that makes one; got {made!r}.")
    return made
