"""Sums within islands, groups of workers that average exactly among themselves; and the islands of each host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from adaptive.base.process.this_host import this_host
from adaptive.base.reductions import Mixed
from adaptive.base.values.numbers import whole
from adaptive.base.world import World
from adaptive.operators.collectives import Collective

from ._leaves import combine, error, leaves_of

T = TypeVar("T")
Islands = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WithinIslands(Mixed):
    """The sum over the members of each worker's island, in the order of their numbers."""

    islands: Islands

    adds_up = True

    def weights(self, step: int, members: Sequence[int]) -> dict[int, dict[int, float]]:
        there = set(members)
        return {
            worker: dict.fromkeys(sorted(there.intersection(island)), 1.0)
            for island in self.islands
            for worker in island
            if worker in there
        }


@dataclass(frozen=True)
class IslandSum(Collective):
    """Collective that sums over the workers of an island. Workers without examples add nothing."""

    islands: Islands

    name = "island_sum"
    label = "sum within islands"
    reduces = True
    result_is_replicated = False
    shows_workers = True

    @property
    def op(self) -> WithinIslands:
        return WithinIslands(self.islands)


def island_sum(tree: T, islands: Islands, *, when: jax.Array | None = None) -> T:
    """Return the sum of `tree` over the workers of this worker's island. Local.

    Each worker sends its leaves to every other worker of its island, and to no others.

    Args:
      tree: a pytree of numbers; of the same shapes on all workers. Local.
      islands: the workers of each island; each worker is in one.
      when: see `all_reduce`. In steps in which it is false the result is the worker's own value.
    """
    return combine(IslandSum(islands), tree, leaves_of("islands", tree), when=when)


def checked_islands(what: str, islands: Any, capacity: int | None, name: str = "islands") -> Islands:
    """Return groups of workers as tuples of worker numbers.

    Args:
      what: name of the function, for errors.
      islands: iterables of workers; each worker is in one of them.
      capacity: the number of worker slots; `None` if it is unknown.
      name: name of the argument, for errors.

    Raises:
      CollectiveError: `islands` are not lists of workers, or a worker is in none of them, or in two.
    """
    try:
        found = tuple(tuple(sorted(whole(worker) for worker in island)) for island in islands)  # type: ignore[type-var]
        workers = sorted(worker for island in found for worker in island)  # type: ignore[type-var]
    except TypeError:
        found, workers = (), []
    if found and all(found) and workers == list(range(len(workers) if capacity is None else capacity)):
        return found  # type: ignore[return-value]
    who = "each worker" if capacity is None else f"each of the {capacity} workers"
    raise error(
        what,
        f"{name}={islands!r} must be lists of workers, which hold {who}, from 0 on, once. Write\n"
        f"    {name}=[[0, 1], [2, 3]]        or  {name}=comm.by_host(world)",
    )


def by_host(world: World) -> tuple[tuple[int, ...], ...]:
    """Return the workers of each host: islands for `sync.islands`. Communicates, so every process calls it.

    A worker slot without a process is a separate island, because its host is unknown.

    Args:
      world: of the program.

    Returns:
      Workers' numbers, by host, in the order of each host's first process. Replicated.

    Example:
      >>> import collectives as comm
      >>> with comm.SoloWorld() as world:
      ...     print(comm.by_host(world))
      ((0,),)
    """
    own = json.dumps([this_host(), list(world.workers)]).encode()
    hosts_of_all = world.all_gather_bytes(own, "the hosts of workers")
    hosts: dict[str, list[int]] = {}
    for host, workers in map(json.loads, hosts_of_all):
        hosts.setdefault(host, []).extend(workers)
    known = {worker for workers in hosts.values() for worker in workers}
    others = ((worker,) for worker in range(world.capacity) if worker not in known)
    return (*(tuple(sorted(workers)) for workers in hosts.values() if workers), *others)
