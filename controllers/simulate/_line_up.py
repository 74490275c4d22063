"""The named policies of `adaptive simulate`, with how often they decide."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
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

from ._simulation import Hooked


class Contender(NamedTuple):
    """A policy to compare."""

    make: Callable[[], Policy]
    about: str
    every: int = 1
    adapts: str = "split"  # what it changes: "split", "batch", "workers", or "members" (which workers take part)


def equal() -> Policy:
    return stateless(lambda observation: None, "equal")


LINE_UP = {
    "equal": Contender(equal, "the initial split: equal sizes"),
    "balance": Contender(balance, "ours: piecewise-linear times and an exact allocator"),
    "static": Contender(static_proportional, "Tyagi & Sharma, open loop: by data-sheet speeds"),
    "proportional": Contender(proportional, "Tyagi & Sharma, closed loop, global batch kept; DBS and DLB are alike"),
    "leader_straggler": Contender(leader_straggler, "LB-BSP on accelerators: a few examples at a time"),
    "lb_bsp": Contender(
        lambda: lb_bsp(narx(), n_inputs=2, dead_band=0.0), "LB-BSP on processors: by speeds that NARX predicts"
    ),
    "noise_batch": Contender(noise_batch, "global batch by the noise scale (KungFu's rule)", 20, "batch"),
    "goodput_batch": Contender(goodput_batch, "global batch by goodput (Pollux)", 20, "batch"),
    "noise_workers": Contender(
        lambda: noise_workers(128), "workers by the noise scale (KungFu's Listing 1), 128 examples each", 20, "workers"
    ),
    "goodput_workers": Contender(goodput_workers, "workers and global batch by goodput (Pollux)", 20, "workers"),
    "mitigate_slow_workers": Contender(
        mitigate_slow_workers, "balance, and swaps of slow workers with the reserve (Falcon)", 1, "members"
    ),
}


def hooked(name: str) -> Hooked:
    """Return the hook for a policy of `LINE_UP` or of a module: `name`, `name@every` or `module:factory@every`.

    The factory is a policy, or a function without arguments that returns one; see `Hooked` for its `reads`.

    Raises:
      ValueError: there is no such policy, or the function does not return one.
    """
    plain, _, number = name.partition("@")
    if number and not (number.isdigit() and int(number) > 0):
        raise ValueError(f"{name!r}: after @, give the interval between decisions, in steps: an integer of at least 1.")
    every = int(number or 1)
    if plain in LINE_UP:
        return Hooked(LINE_UP[plain].make(), every=every if number else LINE_UP[plain].every)
    if ":" not in plain:
        raise ValueError(f"no policy is called {plain!r}; known are {', '.join(LINE_UP)}. Or give module:factory.")
    try:
        found: Any = pkgutil.resolve_name(plain)
        made = found() if callable(found) else found
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{plain}: {error}. Is it on the path (PYTHONPATH=.), without arguments?") from error
    if not isinstance(made, Policy):
        raise ValueError(f"{plain}: expected a controllers.Policy, or a function that makes one; got {made!r}.")
    return Hooked(made, every=every)
