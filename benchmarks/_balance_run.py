"""Run two ranks, with balance and without it in alternation; `balance_*.py` start this script several times.

    mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/_balance_run.py MODEL MILLISECONDS ROUNDS BUSY FILE

Each rank is pinned to a core of its own. MILLISECONDS is how long a rank computes in a step with equal batches and no
other load. With BUSY=1 a process spins on the second core from the first measured step on. Writes JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _examples import ConvNet
from _measure import contention, pin
from _training import driver_of

EXAMPLES, BLOCK = 32768, 20


class Mlp(nn.Module):
    """Three matrices of 256 x 256."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(256)(x))
        return nn.Dense(256)(x)


class TransformerBlock(nn.Module):
    """One block of width 64 with four heads."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))


MODELS = {
    "mlp": (Mlp(), (256,)),
    "conv net": (ConvNet(10), (8, 8, 1)),
    "transformer block": (TransformerBlock(), (16, 64)),
}


def start(model: str, milliseconds: float, rounds: int, busy: bool) -> dict:
    """Run two new ranks, and return their measurements."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        ranks = [Path(sys.executable).with_name("mpirun"), "--oversubscribe", "-n", "2", sys.executable, "-m", "mpi4py"]
        arguments = [model, milliseconds, rounds, int(busy), file]
        environment = {**os.environ, "PJRT_NPROC": "1"}
        subprocess.run([*map(str, (*ranks, __file__, *arguments))], check=True, env=environment)
        return json.loads(file.read_text())


def main(model: str, milliseconds: float, rounds: int, busy: bool, file: str) -> None:
    """Measure on this rank; rank 0 writes the file."""
    from mpi4py import MPI

    import adaptive as ad
    import collectives as comm
    import controllers as ctrl
    import monitors as mon

    ranks = MPI.COMM_WORLD
    core = sorted(os.sched_getaffinity(0))[ranks.rank]
    pin(core)
    net, shape = MODELS[model]
    data = {"x": np.random.default_rng(0).random((EXAMPLES, *shape), np.float32)}
    params = net.init(jax.random.key(0), data["x"][:1])
    optimizer = optax.sgd(1e-3)

    def loss_fn(params, batch):
        return (net.apply(params, batch["x"]) ** 2).mean()

    def equal(grads, avg_grads):
        return {"seconds": comm.all_gather(mon.compute_seconds())}

    def balanced(grads, avg_grads):
        metrics = equal(grads, avg_grads)
        ctrl.hook(ctrl.balance(), metrics["seconds"], every=10)
        return metrics

    local = ranks.bcast(_examples_of(milliseconds, jax.grad(loss_fn), params, data["x"]) if ranks.rank == 0 else None)
    found: dict[str, list] = {"balanced": [], "equal": [], "computed": [], "sizes": [], "hooks": []}
    with comm.world() as world:
        state = params, optimizer.init(params)
        programs = {
            name: ad.Program(driver_of(loss_fn, optimizer, more), state, data, global_batch=2 * local, world=world)
            for name, more in (("balanced", balanced), ("equal", equal))
        }
        for program in programs.values():
            program.warm_up()
            list(program.run(steps=5))
        world.barrier()
        with contention(core) if busy and world.rank else nullcontext():
            world.barrier()
            for _ in range(rounds):
                for name, program in programs.items():
                    for report in program.run(steps=BLOCK):
                        found[name].append(report.seconds)
                        if name == "equal":
                            found["computed"].append(report.compute_seconds[0])
                        else:
                            found["sizes"].append(report.batch_sizes)
                            found["hooks"].append(report.breakdown.hooks)
    computed = np.array(ranks.allgather(found["computed"])).T
    if ranks.rank == 0:
        Path(file).write_text(json.dumps(found | {"computed": computed.tolist(), "local": local}))


def _examples_of(milliseconds: float, gradient, params, x) -> int:
    """Return the number of examples whose step takes this many seconds, a multiple of eight."""
    size, run = 64, jax.jit(gradient)
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        jax.block_until_ready(run(params, {"x": jnp.asarray(x[:size])}))
        seconds.append(time.perf_counter() - began)
    return min(max(8, round(1e-3 * milliseconds * size / min(seconds) / 8) * 8), EXAMPLES // 2)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", sys.argv[5])
