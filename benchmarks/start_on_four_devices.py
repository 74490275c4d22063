"""On four CPU devices a program is compiled once for all of them, which halves the wait for the compiler (aimed at).

    python benchmarks/start_on_four_devices.py

Each start is a process of its own, and the two ways alternate: compiled once for all devices, and once for each.
Reported are the seconds until the end of the first step that steps wait for a compiler, and the seconds that the
background compiler takes for the kernels of all buckets.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from _measure import report

ROUNDS = 3


def start(shared):
    """Start a small conv net on the four devices; return the seconds of waiting, and of all compiles."""
    import jax

    jax.config.update("jax_num_cpu_devices", 4)  # before any of these makes an array
    import optax
    from _loops import OPTIMIZER, conv_net

    import adaptive as ad
    import collectives as comm
    import controllers as ctrl
    import monitors as mon
    from adaptive.runtime import compile as runtime_compile

    if not shared:
        runtime_compile._in_use = lambda key, device: None
    model = conv_net("conv net", 64)

    def driver(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, avg_grads)
        ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
        updates, opt_state = OPTIMIZER.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": comm.all_reduce(loss), "noise": noise.scale}

    state = (model.params, OPTIMIZER.init(model.params))
    with comm.world() as world, ad.Program(driver, state, model.data, global_batch=256, world=world) as program:
        waited = program.step().waited_seconds
        program.warm_up()
        print(json.dumps([waited, program.step().compile_seconds]))


def main():
    found = {"each device": [], "once for all": []}
    for _ in range(ROUNDS):
        for name, seconds in found.items():
            command = [sys.executable, __file__, name]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
            seconds.append(json.loads(done.stdout))
    each, once = (np.array(seconds) for seconds in found.values())
    rows = [
        {
            "compiled": name,
            "waited for": f"{np.median(s[:, 0]):.2f} s",
            "from … to": f"{s[:, 0].min():.2f} … {s[:, 0].max():.2f}",
            "all kernels": f"{np.median(s[:, 1]):.1f} s",
            "from … to ": f"{s[:, 1].min():.1f} … {s[:, 1].max():.1f}",
        }
        for name, s in (("for each device", each), ("once for all", once))
    ]
    ratios = np.median(once / each, axis=0)
    notes = [
        f"Medians of {ROUNDS} starts in turn. Paired ratios: waited for {ratios[0]:.2f}, all kernels {ratios[1]:.2f}."
    ]
    report("Starting on four CPU devices", rows, "start_on_four_devices.md", notes)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        start(sys.argv[1] == "once for all")
    else:
        main()
