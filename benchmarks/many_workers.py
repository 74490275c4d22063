"""What decisions cost with up to 16,384 workers, and the bytes of the status of each.

    python benchmarks/many_workers.py [--write]       # about 2 minutes of one core

Aimed at: 1 ms for 4,096 workers, 5 ms for 16,384; 16 bytes of status a worker. The workers are simulated, the code is
that of programs: hooks, batch sizes, limits, membership, digest and status. Each part is timed by itself, and
`balance` on workers of different speeds, one of which becomes three times slower.

Then two simulated figures: what a message of few bytes takes along a tree of processes, and what all processes take to
agree on their members, from the measured cost of one hop between two processes of this machine.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from _measure import report

import controllers as ctrl
from adaptive.base.decision import Decision, Limits
from adaptive.base.split import split
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.decision_digest import DecisionDigest
from adaptive.control.decisions import apply_decision
from adaptive.control.hooks import Hooks
from adaptive.control.membership import Membership
from adaptive.control.status import status_length
from collectives.worlds.transport.tcp_tree import BELOW
from controllers.simulate._simulation import Hooked, _plan
from controllers.simulate._workers import Workers

SIZES = (64, 1024, 4096, 16384)
EACH = 128  # examples of a worker
STEPS, SLOWER_AT = 160, 100
PREAMBLE = 1024  # bytes


def median_seconds(call: Callable[[], Any], times: int = 15) -> float:
    """Return the median processor time of a call, in seconds."""
    took = []
    for _ in range(times):
        start = time.process_time()
        call()
        took.append(time.process_time() - start)
    return float(np.median(took))


# --- the parts of a decision ------------------------------------------------------------------------------------------


def parts(n: int) -> dict[str, float]:
    """Seconds of each part of a decision on new sizes."""
    rng = np.random.default_rng(n)
    sizes, membership = BatchSizes(EACH * n, None, Limits((1,) * n, (8 * EACH,) * n)), Membership(Workers(n))
    moved = [Decision(shares=tuple(rng.uniform(50, 200, n).tolist())) for _ in range(16)]
    turn = iter(range(10**9))

    def next_decision() -> Decision:
        return moved[next(turn) % len(moved)]

    def requested() -> None:
        apply_decision(next_decision(), sizes, membership, ())
        sizes.on_agreed(can_make_pending=True, can_make_any=True)
        sizes.step_done()

    digest = DecisionDigest()

    def compared() -> None:
        digest.enter(next(turn), "hook 'balance'", next_decision())
        digest.compare(np.full(n, float(digest.value)), own=range(1))

    def left() -> None:
        sizes.change_members(range(1, n), [])
        sizes.change_members(range(n), [0])

    return {
        "split": median_seconds(lambda: split(EACH * n, next_decision().shares or (), sizes.limits)),
        "sizes requested": median_seconds(requested),
        "limits": median_seconds(lambda: sizes.bounds((*sizes.shares,)).nearest(EACH * n + 5)),
        "digest": median_seconds(compared),
        "membership": median_seconds(lambda: (membership.due, membership.leaving)),
        "a worker leaves and joins": median_seconds(left) / 2,
    }


def balancing(n: int) -> dict[str, Any]:
    """Seconds of hooks and sizes after each step, with `balance` on each."""
    rng = np.random.default_rng(n)
    slope = 1e-3 * rng.uniform(1, 2, n)
    membership = Membership(Workers(n))
    sizes = BatchSizes(EACH * n, None, Limits((1,) * n, (8 * EACH,) * n))
    hook = Hooked(ctrl.balance(), ("seconds",))
    hooks, took, moved = None, [], []
    for step in range(1, STEPS + 1):
        if step == SLOWER_AT:
            slope[n // 2] *= 3
        seconds = (slope * np.array(sizes.previous) + 0.02) * np.exp(0.03 * rng.standard_normal(n))
        hooks = hooks or Hooks([_plan(hook, (seconds,))], n, membership)
        ran, leaves = (sizes.current, sizes.previous), [jax.tree.leaves((seconds,))]
        start = time.process_time()
        sizes.on_agreed(can_make_pending=True, can_make_any=True)
        sizes.step_done()
        outcome = hooks.run(step, step / 100, leaves, ran, sizes)
        if outcome.decision is not None:
            apply_decision(outcome.decision, sizes, membership, outcome.requests)
        took.append(time.process_time() - start)
        moved.append(outcome.decision is not None)
    seconds_of, which = np.array(took[20:]), np.array(moved[20:])
    return {
        "quiet": float(np.median(seconds_of[~which])),
        "moving": float(np.median(seconds_of[which])) if which.any() else math.nan,
        "moves": int(which.sum()),
    }


# --- messages, simulated ----------------------------------------------------------------------------------------------


def hop(nbytes: int, rounds: int = 2000) -> float:
    """Seconds of a message between two processes of this machine by TCP, one way, as the median."""
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if not child:
        with socket.create_connection(server.getsockname()) as other:
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while received := other.recv(nbytes, socket.MSG_WAITALL):
                other.sendall(received)
        os._exit(0)
    own, _ = server.accept()
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    message, took = bytes(nbytes), []
    for _ in range(rounds):
        start = time.perf_counter()
        own.sendall(message)
        own.recv(nbytes, socket.MSG_WAITALL)
        took.append((time.perf_counter() - start) / 2)
    own.close()
    server.close()
    os.waitpid(child, 0)
    return float(np.median(took))


def handling(nbytes: int) -> float:
    """Seconds that a process takes to add one child's numbers to its own."""
    own, data = np.zeros(nbytes // 8), np.ones(nbytes // 8).tobytes()
    return median_seconds(lambda: [np.add(own, np.frombuffer(data), out=own) for _ in range(1000)]) / 1000


def tree(n: int, one_hop: float, one_child: float) -> float:
    """Seconds until all of n processes have the sum: up a tree whose processes have `BELOW` children, and down."""
    depth, reached = 0, 1
    while reached < n:
        depth, reached = depth + 1, reached + BELOW ** (depth + 1)
    return depth * (2 * one_hop + BELOW * one_child)


def agreement(n: int, one_hop: float) -> float:
    """Seconds of an agreement on members: a binary tree up and down, once to agree and once to confirm."""
    return 2 * 2 * math.ceil(math.log2(n)) * one_hop


def _us(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def rows(sizes: Sequence[int], small: float, large: Callable[[int], float], child: float) -> list[dict[str, str]]:
    table = []
    for n in sizes:
        with_balance, own = balancing(n), parts(n)
        decision = own["sizes requested"] + own["digest"] + own["membership"]
        status = 4 * status_length(n)
        table.append(
            {"workers": f"{n:,}"}
            | {name: _us(seconds) for name, seconds in own.items()}
            | {
                "a decision, without its policy": _us(decision),
                "`balance`, quiet step": _us(with_balance["quiet"]),
                f"moving ({STEPS} steps)": f"{_us(with_balance['moving'])} ({with_balance['moves']})",
                "status a worker": f"{status / n:.1f} B",
                "tree, simulated": _us(tree(n, large(status), child)),
                "agreement, simulated": _us(agreement(n, small)),
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    args = parser.parse_args()
    small, child = hop(PREAMBLE), handling(PREAMBLE)
    table = rows(args.sizes, small, hop, child)
    report(
        "What decisions cost with many workers",
        table,
        "many_workers.md" if args.write else None,
        [
            "Medians of processor time, of one process. `sizes requested` has the split in it, and a "
            "decision without its policy is the sum of that, the digest and the membership.",
            f"Simulated: a message with the status takes as many hops up and down as a tree has levels whose processes "
            f"have {BELOW} children, and an agreement twice as many as a binary tree. One hop of {PREAMBLE} bytes "
            f"between two processes of this machine by TCP takes {_us(small)}, and adding a child's numbers "
            f"{_us(child)}; hops with a status were measured with its bytes. Networks, switches and stragglers are not "
            "in it.",
        ],
    )


if __name__ == "__main__":
    main()
