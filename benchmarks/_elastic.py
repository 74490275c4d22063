"""Shared by the benchmarks of joining and leaving workers: a program, jobs of several ranks, and recorded events.

A rank writes its events as lines of JSON to a file of its own, so that they survive a kill. Each has its time by
`time.monotonic()`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from _hosts import ROOT, environment

sys.path.insert(0, str(ROOT))  # for `tests`

LOCAL_BATCH, N_EXAMPLES = 128, 8192
LIMIT_SECONDS = 900.0  # of a job


# A process that notes when another one is dead: the system has to take its memory and its threads apart first.
_COUNTS_THE_DEAD = """
import os, select, sys, time
process = os.pidfd_open(int(sys.argv[1]))
select.select([process], [], [])
line = '{"kind": "dead", "t": %r}' % time.monotonic()
open(sys.argv[2], "a").write(line + chr(10))
"""


class Notes:
    """The events that this rank records."""

    def __init__(self, folder: str):
        self._path = Path(folder) / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._file = self._path.open("a", buffering=1)
        self.take("start", pid=os.getpid(), host=socket.gethostname())

    def of_death(self) -> None:
        """Have another process record when this process has died (Linux)."""
        watcher = [sys.executable, "-I", "-S", "-c", _COUNTS_THE_DEAD, str(os.getpid()), str(self._path)]
        subprocess.Popen(watcher, start_new_session=True)

    def take(self, kind: str, **what: Any) -> None:
        """Record an event with the present time."""
        self._file.write(json.dumps({"kind": kind, "t": time.monotonic(), **what}) + "\n")

    def around(self, owner: type, method: str) -> None:
        """Record, from now on, when each call of this method began and ended."""
        original = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                self.take(method, began=began, seconds=time.monotonic() - began)

        setattr(owner, method, noted)


def monitored(world: Any, *, workers: int, mebibytes: int = 0, **options: Any) -> Any:
    """Return a program that trains three matrices with Adam, the noise scale and balancing, on 128 examples per worker.

    A step takes about 5 ms on a core. The state has 1.6 MB, and so many `mebibytes` more that steps do not change.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from _training import driver_of

    import adaptive as ad
    import collectives as comm
    import controllers as ctrl
    import monitors as mon

    rng, widths, optimizer = np.random.default_rng(0), [256, 256, 256, 10], optax.adam(1e-3)
    data = {"x": rng.random((N_EXAMPLES, 256), np.float32), "label": rng.integers(0, 10, N_EXAMPLES).astype(np.int32)}
    shapes = list(itertools.pairwise(widths))
    params = [jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32) for shape in shapes]

    def loss_fn(params, batch):
        x = batch["x"]
        for weights in params[:-1]:
            x = jax.nn.relu(x @ weights)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1], batch["label"]).mean()

    def monitors(grads, avg_grads):
        ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
        return {"noise": mon.noise_scale(grads, avg_grads).scale}

    step = driver_of(loss_fn, optimizer, monitors)

    def driver(state, batch):
        trained, metrics = step(state[:2], batch)
        return (*trained, state[2]), metrics

    rest = [jnp.zeros(1 << 20, jnp.float32) for _ in range(mebibytes // 4)]
    state = params, optimizer.init(params), rest
    return ad.Program(driver, state, data, world=world, global_batch=workers * LOCAL_BATCH, **options)


class Job(NamedTuple):
    """A running job of several ranks."""

    folder: Path
    process: subprocess.Popen[bytes]

    def notes(self) -> list[list[dict[str, Any]]]:
        """Return what each rank has recorded so far, line by line, without lines that are half written."""
        files = [path.read_text() for path in sorted(self.folder.glob("*.jsonl"))]
        return [[json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()] for text in files]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind that all ranks have recorded so far, in their order."""
        found = [line for of_rank in self.notes() for line in of_rank if line["kind"] == kind]
        return sorted(found, key=lambda line: line["t"])

    def finished(self) -> list[list[dict[str, Any]]]:
        """Wait for the job's end, and return what each rank has recorded.

        Raises:
          RuntimeError: the job failed.
        """
        if code := self.process.wait(timeout=LIMIT_SECONDS):
            raise RuntimeError(f"the job ended with {code}")
        return self.notes()


@contextmanager
def job(n: int, script: str, arguments: Sequence[object] = (), hosts: Any = None) -> Iterator[Job]:
    """Start `script --rank FOLDER ARGUMENTS …` on `n` ranks of this host, or alternating between `tests.hosts`."""
    environ = environment(hosts, "node" if hosts else "slot")
    options = ["-n", str(n)]
    if hosts:
        options += ["-H", ",".join(f"h{i}:{n}" for i in range(1, hosts.number + 1))]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        ranks = [*options, script, "--rank", folder, *map(str, arguments)]
        command = [sys.executable, "-m", "launchers.run", *ranks]
        command = hosts.command("h1", command) if hosts else command
        process = subprocess.Popen(command, env=environ)
        try:
            yield Job(Path(folder), process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)
