"""A small GPT that learns Python's documentation character by character, on one device: a loop as in nanoGPT.

What examples/language_model.py is compared with.
"""

import pickle
from collections import deque
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

context, width, heads, layers = 64, 96, 4, 2
batch_size, late_batch_size = 32, 128
max_tokens, late_tokens = 2_000_000, 1_600_000
learning_rate, warmup_tokens = 4e-3, 200_000
eval_every, show_every = 100, 50
out = "language_model.pickle"

# --- the text ---------------------------------------------------------------------------------------------------------

text = "\n\n".join(topics[name] for name in sorted(topics))
alphabet, codes = np.unique(np.array(list(text)), return_inverse=True)
codes = codes.astype(np.uint8)  # there are some 100 different characters
windows = np.lib.stride_tricks.sliding_window_view(codes, context + 1)  # a view, which needs no memory
train, val = windows[: -len(windows) // 10], windows[-len(windows) // 10 + context :: context]
rng = np.random.default_rng(0)


def get_batch(size):
    return train[rng.integers(len(train), size=size)]


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


@jax.jit
def gradient(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return loss, grads, optax.tree.norm(grads)


@jax.jit
def update(params, opt_state, grads, lr):
    updates, opt_state = optimizer(lr).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def is_spike(norm, before):
    middle = np.median(before)
    return len(before) >= 64 and norm > middle + 6 * 1.4826 * np.median(np.abs(before - middle))


def evaluate(params):
    parts = [val[i : i + 256] for i in range(0, len(val), 256)]
    return sum(len(part) * eval_loss(params, part) for part in parts) / len(val)


eval_loss = jax.jit(loss_fn)
lr_at = optax.warmup_cosine_decay_schedule(0, learning_rate, warmup_tokens, max_tokens)
params = init(rng)
opt_state = optimizer(0.0).init(params)
step, tokens, best, norms = 0, 0, float("inf"), deque(maxlen=128)
while tokens < max_tokens:
    batch = get_batch(batch_size if tokens < late_tokens else late_batch_size)
    loss, grads, norm = gradient(params, batch)
    if is_spike(norm, np.array(norms)):
        print(f"step {step}: skipped, the norm of the gradient is {norm:.3g}")
    else:
        params, opt_state = update(params, opt_state, grads, lr_at(tokens))
    norms.append(float(norm))
    step, tokens = step + 1, tokens + len(batch) * context
    if step % show_every == 0:
        print(f"step {step}: {tokens:,} tokens, batch {len(batch)}, loss {loss:.3f}")
    if step % eval_every == 0:
        val_loss = evaluate(params)
        print(f"step {step}: val loss {val_loss:.3f}")
        if val_loss < best:
            best = val_loss
            with open(out, "wb") as file:
                pickle.dump((params, opt_state, step, tokens), file)

with open(out, "rb") as file:
    params, *_ = pickle.load(file)
print(f"\nbest val loss {evaluate(params):.3f}\n")
print(sample(params, 'The "for" statement ', 400, jax.random.key(1)))
