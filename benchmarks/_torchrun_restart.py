"""For comparison: the time from the death of a worker to the next new step under torchrun.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch numpy
    /tmp/torch/bin/python benchmarks/_torchrun_restart.py [--workers 3] [--kills 5] [--json]

A small model trains on CPUs over gloo, and stores its state on a RAM disk after every step: the best case for a
restart. When a worker is killed by SIGKILL, torchrun's agent ends the other workers and starts all of them again. They
import torch, rendezvous, and read the state. Reported are the time from the kill to the end of the first step that had
not been done before, and the median step.

The same file is the driver and, started by torchrun, the worker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS_BETWEEN_KILLS = 200


def work(folder: Path, kills: int) -> None:
    """Train on one worker from the last stored state on."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size, started = (int(os.environ[v]) for v in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    # A file for each start: by torchrun's own store, after a restart, gloo was given the address of the dead worker.
    dist.init_process_group("gloo", init_method=f"file://{folder}/start-{started}", rank=rank, world_size=size)
    torch.manual_seed(0)
    layers = torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(256, 256), torch.randint(10, (256,))
    first, state = 0, folder / "state.pt"
    if state.exists():
        saved = torch.load(state)
        first = saved["step"]
        model.load_state_dict(saved["model"])
    log = (folder / "log").open("a", buffering=1)
    victim, at = started % size, STEPS_BETWEEN_KILLS * (started + 1)
    for step in range(first, STEPS_BETWEEN_KILLS * (kills + 1)):
        if rank == victim and step == at and started < kills:
            log.write(f"kill {step} {time.time()}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.time()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if rank == 0:
            log.write(f"step {step} {time.time()} {time.time() - start}\n")
            torch.save({"step": step + 1, "model": model.state_dict()}, folder / "new.pt")
            (folder / "new.pt").rename(state)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print a list, kill by kill, for `survival.py`")
    args = parser.parse_args()
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        work(args.folder, args.kills)
        return
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        options = ["--standalone", f"--nproc-per-node={args.workers}", f"--max-restarts={args.kills}"]
        options += ["--monitor-interval=0.1"]  # seconds between two looks at the workers: the least that is sensible
        script = [__file__, "--folder", folder, "--kills", str(args.kills)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, *script]
        subprocess.run(torchrun, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        report((Path(folder) / "log").read_text().splitlines(), args.workers, args.json)


def report(lines: list[str], workers: int, as_json: bool) -> None:
    """Print the result from the workers' records: `kill STEP TIME` and `step STEP TIME SECONDS`."""
    words = [line.split() for line in lines]
    kills = {int(w[1]): float(w[2]) for w in words if w[0] == "kill"}
    ends = {int(w[1]): float(w[2]) for w in reversed(words) if w[0] == "step"}  # the first time that it was done
    waits = [min(end for step, end in ends.items() if step >= at and end > t) - t for at, t in kills.items()]
    median = statistics.median(float(w[3]) for w in words if w[0] == "step")
    if as_json:
        print(json.dumps([{"rank": i % workers, "whole": wait, "median": median} for i, wait in enumerate(waits)]))
        return
    print(f"torchrun, {workers} workers, {len(waits)} kills; median step {1e3 * median:.1f} ms")
    print(f"kill to next new step: median {statistics.median(waits):.2f} s, {min(waits):.2f} to {max(waits):.2f} s")


if __name__ == "__main__":
    main()
