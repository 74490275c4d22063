"""The model of a strategy's cost on a link, `sync.step_cost`, beside bytes and seconds of steps on such links.

    python benchmarks/step_cost.py [--output step_cost.md]

Four workers train a net of dense layers (0.6 million parameters) by each strategy, as two ranks on each of two hosts,
and as one rank on each of four (network namespaces of this machine: Linux and root), whose links carry 100 Mbit/s each
way (`--rate`). Bytes are those that a host's interface sends, by the kernel's count, headers of TCP included. The model
gets the seconds that workers measured for computing.

`--rank` is what each rank runs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _hosts import job, joined, tell
from _measure import report

import adaptive as ad
import collectives as comm
import collectives.strategies as sync

WORKERS, LOCAL_STEPS, SIZE, WIDTH = 4, 8, 16, 512
SGD, OUTER = optax.sgd(0.01), optax.sgd(0.7)
NAMES = ["synchronous", "synchronous, 4bit", "pair_averaging, ring", "diloco, 4bit", "diloco, top_k", "islands, 4bit"]


def strategy_of(name: str, islands: Any) -> sync.Strategy:
    match name:
        case "synchronous":
            return sync.synchronous(SGD)
        case "synchronous, bfloat16":
            return sync.synchronous(SGD, wire=jnp.bfloat16)
        case "synchronous, 4bit":
            return sync.synchronous(SGD, wire="4bit")
        case "pair_averaging, ring":
            return sync.pair_averaging(SGD, "ring")
        case "diloco":
            return sync.diloco(SGD, OUTER, LOCAL_STEPS)
        case "diloco, 4bit":
            return sync.diloco(SGD, OUTER, LOCAL_STEPS, wire="4bit")
        case "diloco, top_k":
            return sync.diloco(SGD, OUTER, LOCAL_STEPS, wire=comm.top_k(64))
        case "streamed":
            return sync.streamed(SGD, OUTER, LOCAL_STEPS, 2)
        case "islands":
            return sync.islands(SGD, OUTER, LOCAL_STEPS, islands)
        case _:
            return sync.islands(SGD, OUTER, LOCAL_STEPS, islands, wire="4bit")


def sent_bytes() -> int:
    """Bytes that this host's interface has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "e0":
            return int(rest.split()[8])
    raise RuntimeError("this host has no interface e0: it is not one of tests/hosts.py")


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = batch
    for layer in params:
        x = jnp.tanh(x @ layer)
    return (x**2).mean()


def measured(world: Any, strategy: sync.Strategy, seconds: float) -> dict[str, float]:
    """Seconds and bytes of a local step. Communicates."""
    local_steps = strategy.traffic().local_steps

    def driver(state: Any, batch: Any) -> Any:
        state, loss = strategy.step(state, jax.value_and_grad(loss_fn), batch)
        return state, {"loss": comm.all_reduce(loss)}

    params = [np.full((WIDTH, WIDTH), 0.01, np.float32)] * 2 + [np.full((WIDTH, 10), 0.01, np.float32)]
    data = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
    options = {"per_worker_state": strategy.per_worker_state, "world": world, "resizable": False}
    batch = WORKERS * SIZE * local_steps
    program = ad.Program(driver, strategy.init(params), data, global_batch=batch, **options)
    program.warm_up()
    each = LOCAL_STEPS // local_steps  # program steps in a round

    def run(steps: int) -> tuple[float, float, float]:
        """Seconds, bytes and seconds of computing of so many steps of the program."""
        world.all_gather_bytes(b"", "begin")
        start, before = time.perf_counter(), sent_bytes()
        computed = [sum(program.step().compute_seconds) for _ in range(steps)]
        took, sent = time.perf_counter() - start, sent_bytes() - before
        of_all = [json.loads(own) for own in world.all_gather_bytes(json.dumps([took, computed]).encode(), "end")]
        slowest = np.array([row for _, row in of_all]).max(0).sum()
        return max(seconds for seconds, _ in of_all), sent, float(slowest)

    run(8)  # in which the algorithm of sums is chosen
    rounds = max(2, round(seconds / run(each)[0]))
    took, sent, computed = run(rounds * each)
    steps = rounds * LOCAL_STEPS
    program.close()
    return {
        "parameters": sum(layer.size for layer in params),
        "seconds": took / steps,
        "bytes": sent / steps,
        "compute": computed / steps,
    }


def rank(seconds: float) -> None:
    found = {}
    with comm.world() as world:
        islands = comm.by_host(world)
        for name in NAMES:
            found[name] = measured(world, strategy_of(name, islands), seconds)
        if world.rank == 0:
            tell(found)


def rows(found: dict[str, dict[str, float]], hosts: int, rate: str) -> list[dict[str, str]]:
    """A row for each strategy."""
    each, table = WORKERS // hosts, []
    islands = [range(host * each, (host + 1) * each) for host in range(hosts)]
    for name, own in found.items():
        cost = sync.step_cost(
            strategy_of(name, islands),
            own["parameters"],
            rate.replace("bit", "bit/s"),
            hosts=hosts,
            workers_per_host=each,
            compute=own["compute"],
        )
        table.append(
            {
                "hosts x workers": f"{hosts} x {each}",
                "strategy": name,
                "sent by a host, model": f"{cost.bytes_between_hosts / 1e3:,.1f} kB",
                "counted": f"{own['bytes'] / 1e3:,.1f} kB",
                "ratio": f"{own['bytes'] / cost.bytes_between_hosts:.2f}",
                "a local step, model": f"{1e3 * cost.seconds:.1f} ms",
                "of it computing": f"{1e3 * cost.compute_seconds:.1f} ms",
                "measured": f"{1e3 * own['seconds']:.1f} ms",
                "ratio ": f"{own['seconds'] / cost.seconds:.2f}",
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps, of each strategy")
    parser.add_argument("--rate", default="100Mbit", help="of the hosts' links, as tc reads it")
    parser.add_argument("--output", help="the result's name")
    args = parser.parse_args()
    if args.rank:
        rank(args.seconds)
        return
    table = []
    with tempfile.TemporaryDirectory() as cache:
        environ = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for hosts in (2, 4):
            with joined(hosts, args.rate) as made:
                found = job([__file__, "--rank", "--seconds", str(args.seconds)], WORKERS, made, environ=environ)
            table += rows(found, hosts, args.rate)
    report(
        "What a local step costs on a link: the model, and what was measured",
        table,
        args.output,
        [
            f"{WORKERS} ranks share {os.cpu_count()} cores with all hosts' TCP. Links: {args.rate}/s; rounds "
            f"have {LOCAL_STEPS} local steps; about {args.seconds:g} s of steps of each strategy. Counted bytes have "
            "TCP's headers and acknowledgements.",
        ],
    )


if __name__ == "__main__":
    main()
