"""When a worker is lost in the first steps, while kernels are still being compiled, the next step takes at most 1 s.

    python benchmarks/early_loss.py [--jobs 2]

Three ranks train 24 dense layers with Adam, with an empty compilation cache. One is killed after step 1, or after step
2. "Waited" is for how long the others waited for kernels after the loss. `--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile

import numpy as np
from _elastic import Notes, job
from _measure import readable, report

WIDTH, LAYERS, EXAMPLES, GLOBAL_BATCH, STEPS = 128, 24, 4096, 120, 40


def rank(folder: str, dies_after: int) -> None:
    """Train on this rank; rank 1 kills itself after a step."""
    notes = Notes(folder)
    import jax
    import jax.numpy as jnp
    import optax

    import adaptive as ad
    import collectives as comm

    optimizer, rng = optax.adam(1e-3), np.random.default_rng(0)

    def loss_fn(params, x):
        for weights in params:
            x = x + jax.nn.gelu(jnp.tanh(x @ weights) / (1 + jnp.abs(x).mean(-1, keepdims=True)))
        return (x**2).mean()

    def driver(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["x"])
        updates, opt = optimizer.update(comm.all_reduce(grads), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": comm.all_reduce(loss)}

    params = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 30, jnp.float32) for _ in range(LAYERS)]
    data = {"x": rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)}
    with comm.world() as world:
        own, state = world.rank, {"params": params, "opt": optimizer.init(params)}
        program = ad.Program(driver, state, data, global_batch=GLOBAL_BATCH, world=world)
        for step in program.run(steps=STEPS):
            if step.step in (dies_after, dies_after + 1):
                sizes = [int(size) for size in step.batch_sizes]
                notes.take("step", step=step.step, seconds=step.seconds, sizes=sizes, waited=step.waited_seconds)
            if step.step == dies_after and own == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def row(dies_after: int, jobs: int) -> dict[str, object]:
    """Run jobs, and return the line of the table: the slowest survivor of each."""
    seconds, waited, sizes = [], [], []
    for _ in range(jobs):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            with job(3, __file__, ["--dies-after", dies_after]) as running:
                notes = running.finished()
        steps = [[line for line in lines if line["kind"] == "step"] for lines in notes]
        pairs = [(before, after) for before, after in (s for s in steps if len(s) == 2)]
        seconds.append(max(after["seconds"] for _, after in pairs))
        waited.append(max(after["waited"] - before["waited"] for before, after in pairs))
        sizes.append(" + ".join(map(str, pairs[0][1]["sizes"])))
    return {
        "killed after step": dies_after,
        "jobs": jobs,
        "the next step": ", ".join(map(readable, seconds)),
        "waited": ", ".join(map(readable, waited)),
        "its batch sizes": sizes[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", metavar="FOLDER")
    parser.add_argument("--dies-after", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, args.dies_after)
        return
    rows = [row(dies_after, args.jobs) for dies_after in (1, 2)]
    notes = [f"{os.cpu_count()} cores; load average at the end {os.getloadavg()[0]:.1f}."]
    report("A loss in the first steps", rows, "early_loss.md", notes)


if __name__ == "__main__":
    main()
