"""A small GPT that learns Python's documentation by characters: a loop as in nanoGPT, on any number of workers.

    adaptive run -n 2 examples/language_model.py
    python examples/language_model.py

It differs from a program of 136 lines for one device in 58 lines. The batch grows once, late in the run, and the
learning rate follows the tokens; a step with a spike of the gradient's norm changes nothing; the best state by the
validation loss is kept. If it is interrupted, the same command continues it. It takes two minutes on two cores, and
needs no data: the text is that of `help()`.
"""

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

context, width, heads, layers = 64, 96, 4, 2
batch_size, late_batch_size = 32, 128
max_tokens, late_tokens = 2_000_000, 1_600_000
learning_rate, warmup_tokens = 4e-3, 200_000
eval_every, show_every = 100, 50
out = "runs/language_model"

# --- the text ---------------------------------------------------------------------------------------------------------

text = "\n\n".join(topics[name] for name in sorted(topics))
alphabet, codes = np.unique(np.array(list(text)), return_inverse=True)
codes = codes.astype(np.uint8)  # there are some 100 different characters
windows = np.lib.stride_tricks.sliding_window_view(codes, context + 1)  # a view, which needs no memory
train, val = windows[: -len(windows) // 10], windows[-len(windows) // 10 + context :: context]
rng = np.random.default_rng(0)


# --- the model --------------------------------------------------------------------------------------------------------


def init(rng):
    def normal(*shape):
        return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(layers)]
    embedding = {"characters": normal(len(alphabet), width), "places": normal(context, width)}
    return {**embedding, "blocks": blocks, "head": normal(width, len(alphabet))}


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def logits(params, codes):
    """Return the logits of the character after each one; codes have shape=(examples, characters)."""
    x = params["characters"][codes] + params["places"][: codes.shape[1]]
    for block in params["blocks"]:
        q, k, v = jnp.moveaxis((normalized(x) @ block["qkv"]).reshape(*codes.shape, 3, heads, -1), 2, 0)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.relu(normalized(x) @ block["up"]) @ block["down"]
    return normalized(x) @ params["head"]


def loss_fn(params, codes):
    codes = codes.astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, codes[:, :-1]), codes[:, 1:]).mean()


def sample(params, begin, length, key):
    """Return `begin` continued by `length` characters."""

    def next_one(window, key):
        code = jax.random.categorical(key, logits(params, window[None])[0, -1] / 0.7)
        return jnp.append(window[1:], code), code

    window = np.searchsorted(alphabet, np.array(list(begin.rjust(context)[-context:])))
    _, written = jax.lax.scan(next_one, jnp.asarray(window, jnp.int32), jax.random.split(key, length))
    return begin + "".join(alphabet[np.asarray(written)])


# --- training ---------------------------------------------------------------------------------------------------------


def optimizer(lr):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, b2=0.99, weight_decay=0.01))


def driver(state, batch):
    params, opt_state = state
    loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(params, batch))
    spike = mon.spike(mon.gradient_norm(grads))
    updates, opt_state = optimizer(ad.hyperparameter("lr", 0.0)).update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), opt_state
    ctrl.hook(schedule)
    return jax.tree.map(lambda old, new: jnp.where(spike, old, new), state, new), {"loss": loss, "skipped": spike}


def evaluation(state, batch):
    return {"loss": loss_fn(state[0], batch)}


lr_at = optax.warmup_cosine_decay_schedule(0, learning_rate, warmup_tokens, max_tokens)
batches = {0: batch_size, late_tokens: late_batch_size}
schedule = ctrl.schedule(batches, by="tokens", tokens_per_example=context, lr=lr_at)
params = init(rng)
opt_state = optimizer(0.0).init(params)
world = comm.world()
show = print if world.rank == 0 else lambda *_: None
checkpoints = ad.Checkpoints(out, every="1 epoch", keep_best=("val.loss", "min"))
program = ad.Program(driver, (params, opt_state), train, global_batch=batch_size, world=world)
program.restore(checkpoints, missing_ok=True)
for report in program.run(checkpoint=checkpoints, record=f"{out}.jsonl"):
    step, tokens = report.step, report.examples * context
    if step % show_every == 0:
        show(f"step {step}: {tokens:,} tokens, batch {report.global_batch}, loss {report.metrics['loss']:.3f}")
    if step % eval_every == 0:
        val_loss = program.evaluate(evaluation, val, log="val")["loss"]
        show(f"step {step}: val loss {val_loss:.3f}")
        program.save()
    if tokens >= max_tokens:
        program.stop()

program.restore(checkpoints.best())
show(f"\nbest val loss {program.evaluate(evaluation, val)['loss']:.3f}\n")
show(sample(program.state[0], 'The "for" statement ', 400, jax.random.key(1)))
world.close()
