"""The language model that is trained: a transformer of two blocks on Python's own documentation, by characters."""

from __future__ import annotations

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 96, 4, 2


def text(context: int = CONTEXT) -> tuple[dict, dict, int]:
    """Return windows of text to train on, windows to test on, and the number of different characters."""
    characters = np.array(list("\n\n".join(topics[name] for name in sorted(topics))))
    alphabet, codes = np.unique(characters, return_inverse=True)
    windows = np.lib.stride_tricks.sliding_window_view(codes.astype(np.int32), context + 1)[:: context // 2]
    last = len(windows) // 10
    return {"codes": windows[: -last - 2]}, {"codes": windows[-last:]}, len(alphabet)


def init(
    seed: int,
    n_characters: int,
    *,
    width: int = WIDTH,
    blocks: int = BLOCKS,
    context: int = CONTEXT,
    scales: bool = False,
) -> dict:
    """Return random weights; with `scales`, those of norm layers, too, which are ones."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(blocks)]
    params = {"characters": normal(n_characters, width), "positions": normal(context, width), "blocks": layers}
    if scales:
        params["last_scale"] = jnp.ones(width)
        params["blocks"] = [block | {"qkv_scale": jnp.ones(width), "up_scale": jnp.ones(width)} for block in layers]
    return params


def logits_of(params: dict, batch: dict) -> jax.Array:
    """Return what is predicted of each next character; shape=(windows, CONTEXT, characters)."""
    x = params["characters"][batch["codes"][:, :-1]] + params["positions"]
    for block in params["blocks"]:
        q, k, v = jnp.moveaxis(
            (_normalized(x, block.get("qkv_scale")) @ block["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0
        )
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.relu(_normalized(x, block.get("up_scale")) @ block["up"]) @ block["down"]
    return _normalized(x, params.get("last_scale")) @ params["characters"].T


def loss_fn(params: dict, batch: dict) -> jax.Array:
    """Return the mean cross entropy per character, in nats."""
    logits = logits_of(params, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["codes"][:, 1:]).mean()


def _normalized(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    normalized = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return normalized if scale is None else scale * normalized
