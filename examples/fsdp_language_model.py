"""A decoder whose workers are meshes: its state is sharded by FSDP and tensor parallelism over each process's devices.

    adaptive run -n 2 fsdp_language_model.py     two workers of 2 x 2 CPU devices, or of the GPUs that each process sees
    python fsdp_language_model.py                one worker

Within a worker JAX shards, as everywhere: parameters, moments and averages have `NamedSharding`s, and XLA adds the
communication between devices. Between workers, gradients are reduced shard by shard. Each worker's share of the batch
follows its speed, and workers may be lost. The text comes with Python. It takes a minute on two cores.
"""

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--global-batch", type=int, default=32, help="windows of text per step")
parser.add_argument("--context", type=int, default=32, help="characters that the next one is guessed from")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--tp", type=int, default=2, help="devices over which each matrix is split by tensor parallelism")
parser.add_argument("--checkpoints", default=None, help="a folder; a run continues where the last one stopped")
parser.add_argument("--show-every", type=int, default=20, help="steps")
args = parser.parse_args()
os.environ.setdefault("PJRT_NPROC", "1")  # CPU devices and ranks share the cores; set before JAX starts

from pydoc_data.topics import topics  # noqa: E402

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 4)  # without a GPU
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
import monitors as mon  # noqa: E402

HEADS = 4

# --- the text, as windows ---------------------------------------------------------------------------------------------

text = "\n\n".join(topics[name] for name in sorted(topics))
alphabet, codes = np.unique(np.array(list(text)), return_inverse=True)
windows = np.lib.stride_tricks.sliding_window_view(codes.astype(np.uint8), args.context + 1)[:: args.context // 2]
held_out = len(windows) // 20
train, test = {"codes": windows[: -held_out - 2]}, {"codes": windows[-held_out:]}
vocabulary = -(-len(alphabet) // 16) * 16  # so that it can be split

# --- the model, and how it is sharded ---------------------------------------------------------------------------------

devices = jax.local_devices()
tp = args.tp if len(devices) % args.tp == 0 else 1
mesh = jax.make_mesh((len(devices) // tp, tp), ("fsdp", "tp"), devices=devices, axis_types=(AxisType.Auto,) * 2)

BLOCK = {
    "scales": P(),
    "qkv": P("fsdp", "tp"),
    "out": P("tp", "fsdp"),
    "up": P("fsdp", "tp"),
    "down": P("tp", "fsdp"),
}
SPECS = {
    "characters": P("tp", "fsdp"),
    "places": P(None, "fsdp"),
    "blocks": [BLOCK] * args.layers,
    "scale": P(),
}
SHARDINGS = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda node: isinstance(node, P))


def init():
    """Return initial weights; jitted with shardings, so that no device ever holds the whole model."""
    width, keys = args.width, iter(jax.random.split(jax.random.key(0), 2 + 4 * args.layers))

    def normal(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    return {
        "characters": normal(vocabulary, width),
        "places": normal(args.context, width),
        "blocks": [
            {
                "scales": jnp.ones((2, width)),
                "qkv": normal(width, 3 * width),
                "out": normal(width, width),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width),
            }
            for _ in range(args.layers)
        ],
        "scale": jnp.ones(width),
    }


def normalized(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss_fn(params, batch):
    codes = batch["codes"].astype(jnp.int32)
    inputs, targets = codes[:, :-1], codes[:, 1:]
    x = params["characters"][inputs] + params["places"]
    for block in params["blocks"]:
        heads = (normalized(x, block["scales"][0]) @ block["qkv"]).reshape(*inputs.shape, 3, HEADS, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.relu(normalized(x, block["scales"][1]) @ block["up"]) @ block["down"]
    logits = normalized(x, params["scale"]) @ params["characters"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0, 4e-3, args.steps // 10, args.steps), weight_decay=0.01),
)


def driver(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    avg_grads = comm.all_reduce(grads)
    noise = mon.noise_scale(grads, avg_grads)
    ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
    updates, opt = tx.update(avg_grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    ema = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, state["ema"], params)
    return {"params": params, "opt": opt, "ema": ema}, {"loss": comm.all_reduce(loss), "noise": noise.scale}


with comm.world(mesh=mesh) as world:
    show = print if world.rank == 0 else lambda *_: None
    params = jax.jit(init, out_shardings=SHARDINGS)()
    state = {"params": params, "opt": tx.init(params), "ema": jax.tree.map(jnp.copy, params)}
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    on_device = sum(leaf.addressable_data(0).size for leaf in jax.tree.leaves(params))
    show(f"{world}\n{weights:,} weights, of which a device holds {on_device:,}\n")

    program = ad.Program(driver, state, train, global_batch=args.global_batch, world=world)
    if args.checkpoints:
        program.restore(args.checkpoints, missing_ok=True)
    kept = ad.Checkpoints(args.checkpoints, every=50) if args.checkpoints else None
    show(f"{'step':>6} {'loss':>7} {'noise scale':>12} {'ms/step':>8}   batch sizes")
    for report in program.run(steps=args.steps, checkpoint=kept):
        if report.step % args.show_every == 0:
            loss, noise = float(report.metrics["loss"]), float(report.metrics["noise"])
            sizes = " + ".join(map(str, report.batch_sizes))
            show(f"{report.step:>6} {loss:>7.3f} {noise:>12.1f} {report.seconds * 1e3:>8.1f}   {sizes}")

    for name in ("params", "ema"):
        nats = program.evaluate(lambda state, batch, name=name: loss_fn(state[name], batch), test)
        show(f"{nats / np.log(2):.2f} bits a character on text that it has not seen, by {name!r}")
