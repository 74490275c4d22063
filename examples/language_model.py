"""A small language model, character by character, on Python's own documentation: a transformer in plain JAX.

    mpirun -n 2 python -m mpi4py language_model.py     two workers
    python language_model.py --devices 2               two workers in one process
    python language_model.py                           one

This file needs no other file of this folder. The text comes with Python, in `pydoc_data` (what `help("FOR")` prints).
The batch starts small and follows the gradient noise scale; each worker's share follows its speed. The run takes a
minute on two cores; at the end the model generates text.
"""

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=700)
parser.add_argument("--global-batch", type=int, default=32, help="windows of text per step, to begin with")
parser.add_argument("--max-batch", type=int, default=128, help="and at most")
parser.add_argument("--context", type=int, default=64, help="characters that the next one is guessed from")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--devices", type=int, default=1, help="workers in one process, each on a CPU device")
parser.add_argument("--show-every", type=int, default=50, help="steps")
args = parser.parse_args()
if "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ:
    os.environ.setdefault("PJRT_NPROC", "1")  # ranks share the cores: one thread each, set before JAX starts

from pydoc_data.topics import topics  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
import monitors as mon  # noqa: E402

if args.devices > 1:
    jax.config.update("jax_num_cpu_devices", args.devices)

# --- the text, as windows that overlap by half: a view, which needs no additional memory ------------------------------

text = "\n\n".join(topics[name] for name in sorted(topics))
alphabet, codes = np.unique(np.array(list(text)), return_inverse=True)
codes = codes.astype(np.uint8)  # Python's text has some 100 different characters
windows = np.lib.stride_tricks.sliding_window_view(codes, args.context + 1)[:: args.context // 2]
last = len(windows) // 10  # test windows: the end of the text, which no training window overlaps
train, test = {"codes": windows[: -last - 2]}, {"codes": windows[-last:]}

# --- the model -------------------------------------------------------------------------------------------------------

HEADS = 4


def init(seed):
    """Return initial weights, small enough that all characters are equally likely at first."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)

    width = args.width
    return {
        "characters": normal(len(alphabet), width),
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


def normalized(x, scale):  # over the width, independently for each character, so that nothing depends on the batch
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def logits(params, codes):
    """Return the logits of the character after each one; codes have shape=(examples, characters)."""
    x = params["characters"][codes] + params["places"][: codes.shape[1]]
    for block in params["blocks"]:
        heads = (normalized(x, block["scales"][0]) @ block["qkv"]).reshape(*codes.shape, 3, HEADS, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.relu(normalized(x, block["scales"][1]) @ block["up"]) @ block["down"]
    return normalized(x, params["scale"]) @ params["characters"].T


def loss_fn(params, batch):
    codes = batch["codes"].astype(jnp.int32)
    guesses = logits(params, codes[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(guesses, codes[:, 1:]).mean()


tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0, 4e-3, args.steps // 10, args.steps), weight_decay=0.01),
)


def driver(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    avg_grads = comm.all_reduce(grads)
    noise = mon.noise_scale(grads, avg_grads)
    ctrl.hook(ctrl.noise_batch(min_batch=args.global_batch, max_batch=args.max_batch), noise, every=20)
    ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
    updates, opt_state = tx.update(avg_grads, opt_state, params)
    state = optax.apply_updates(params, updates), opt_state
    return state, {"loss": comm.all_reduce(loss), "noise": noise.scale}


# --- generating text -------------------------------------------------------------------------------------------------


def write(params, begin, length, key):
    """Return `begin` continued by `length` characters that the model generates."""

    @jax.jit
    def go_on(window, keys):
        def next_one(window, key):
            code = jax.random.categorical(key, logits(params, window[None])[0, -1] / 0.7)
            return jnp.append(window[1:], code), code

        return jax.lax.scan(next_one, window, keys)[1]

    return begin + "".join(alphabet[np.asarray(go_on(codes_of(begin), jax.random.split(key, length)))])


def codes_of(text):
    """Return the last `context` characters as codes, padded with spaces on the left; shape=(context,)."""
    padded = text.rjust(args.context)[-args.context :]
    return np.searchsorted(alphabet, np.array(list(padded))).astype(np.int32)


params = init(seed=0)
size = sum(leaf.size for leaf in jax.tree.leaves(params))

with comm.world() as world:
    show = print if world.rank == 0 else lambda *_: None
    show(f"{len(text):,} characters, {len(alphabet)} different ones; a model of {size:,} weights\n")
    program = ad.Program(driver, (params, tx.init(params)), train, global_batch=args.global_batch, world=world)

    show(f"{'step':>6} {'loss':>7} {'noise scale':>12} {'ms/step':>8}   batch sizes")
    milliseconds = []
    for report in program.run(steps=args.steps):
        milliseconds.append(report.seconds * 1e3)
        if report.step % args.show_every == 0:
            loss, noise = float(report.metrics["loss"]), float(report.metrics["noise"])
            sizes = " + ".join(map(str, report.batch_sizes)) + f" = {report.global_batch}"
            show(f"{report.step:>6} {loss:>7.3f} {noise:>12.1f} {np.median(milliseconds):>8.1f}   {sizes}")
            milliseconds = []

    bits = program.evaluate(lambda state, batch: loss_fn(state[0], batch), test) / np.log(2)
    show(f"\n{bits:.2f} bits a character on text that it has not seen, after {report.examples:,} windows\n")
    if world.rank == 0:
        print(write(program.state[0], 'The "for" statement ', 400, jax.random.key(1)))
