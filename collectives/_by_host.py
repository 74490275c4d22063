"""`by_host`: which workers are on the same host."""

from __future__ import annotations

import json

from adaptive.base.this_host import this_host
from adaptive.base.world import World


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
    hosts_of_all = world.all_gather_bytes(own, "the hosts of workers") if world.processes > 1 else [own]
    hosts: dict[str, list[int]] = {}
    for host, workers in map(json.loads, hosts_of_all):
        hosts.setdefault(host, []).extend(workers)
    known = {worker for workers in hosts.values() for worker in workers}
    others = ((worker,) for worker in range(world.capacity) if worker not in known)
    return (*(tuple(sorted(workers)) for workers in hosts.values() if workers), *others)
