"""Start jobs of several ranks on one host, or on several network namespaces of this machine (Linux and root)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "RESULT "


@contextmanager
def joined(n: int, rate: str = "") -> Iterator[Any]:
    """Return `n` hosts whose links carry `rate` in each direction, in tc's notation; by default there is no limit."""
    sys.path.insert(0, str(ROOT))
    from tests.hosts import hosts

    with hosts(n, rate) as made:
        yield made


def environment(made: Any = None, placement: str = "slot") -> dict[str, str]:
    """Return the environment of a job whose ranks have one thread each and share cores; arguments as for `job`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_", "PMIX_"))}
    return {
        **inherited,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": f"{placement}:oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "PJRT_NPROC": "1",
        "PYTHONPATH": str(ROOT),
        **(made.environment() if made is not None else {}),
    }


def job(
    script: Sequence[str],
    n: int,
    made: Any = None,
    *,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    placement: str = "slot",
) -> Any:
    """Run `n` ranks of a script with one thread each; with `hosts`, the same number on each.

    Args:
      script: its path and arguments.
      options, environ: for mpirun; `environ` overrides the defaults of this function.
      placement: "slot": consecutive ranks share a host; "node": ranks alternate between the hosts.

    Returns:
      What one of the ranks passed to `tell`.
    """
    given = {**environment(made, placement), **(environ or {})}
    ranks = ["-n", str(n), sys.executable, "-m", "mpi4py", *script]
    command = [str(Path(sys.executable).with_name("mpirun")), *options]
    if made is not None:
        command += ["-H", ",".join(f"h{i}:{n // made.number}" for i in range(1, made.number + 1))]
    command = [*command, *ranks] if made is None else made.command("h1", [*command, *ranks])
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, env=given, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        raise RuntimeError(f"exit status {done.returncode} of {' '.join(command)}\n{done.stdout[-2000:]}")
    return json.loads(found[0].removeprefix(MARK))


def tell(result: Any) -> None:
    """Set what `job` returns; one rank calls this."""
    print(MARK + json.dumps(result), flush=True)
