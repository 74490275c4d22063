"""Start processes that `jax.distributed` joins from ordinary tests, under a hard time limit."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mpirun import Result, count_launch, execute, plain_environment
from tests.speed import at_start

JOB = "TESTS_JAX_JOB"  # COORDINATOR RANK PROCESSES, for `join`
HEARTBEAT = round(60 * at_start())  # seconds after which JAX takes a process for dead, and ends the others


def join() -> None:
    """Be one of the processes that `run` has started; in any other process, do nothing."""
    if JOB in os.environ:
        import jax

        address, rank, processes = os.environ[JOB].split()
        jax.distributed.initialize(
            address,
            int(processes),
            int(rank),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )


def run(
    script: str | Path | Sequence[str | Path],
    n: int = 2,
    *,
    timeout: float = 100.0,
    env: Mapping[str, str] | None = None,
    expect_failure: bool = False,
) -> list[Result]:
    """Run `python SCRIPT …` in `n` processes and wait for all; nothing of them survives this call.

    Args:
      script: a script, or it and its arguments; `["-m", "module", …]` runs a module. It calls `join()`.
      n: how many processes.
      timeout: seconds in which all end on an idle machine. Some time later, by how slow this one is, all are killed and
        the test fails.
      env: variables to add to the environment.
      expect_failure: all processes must end with an exit status other than 0, rather than with 0.

    Returns:
      What became of each.
    """
    arguments = [str(part) for part in ([script] if isinstance(script, (str, Path)) else script)]
    count_launch()
    with reserved_address() as address, ThreadPoolExecutor(n) as pool:
        command, shared = [sys.executable, *arguments], plain_environment(env or {})
        results = list(
            pool.map(lambda rank: execute(command, {**shared, JOB: f"{address} {rank} {n}"}, timeout), range(n))
        )
    if any((result.returncode != 0) != expect_failure for result in results):
        said = "\n".join(f"=== process {rank}: {result}" for rank, result in enumerate(results))
        wanted = "fail" if expect_failure else "end with 0"
        pytest.fail(f"{n} processes of {' '.join(arguments)} were to {wanted}:\n{said}", pytrace=False)
    return results


@contextmanager
def reserved_address() -> Iterator[str]:
    """Reserve an address of this host for a coordinator.

    Of a port that is merely free, another job's connection may take the number before the coordinator has imported JAX.
    This one stays bound, and is shared (SO_REUSEPORT) with the coordinator, whose gRPC asks for the same.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
