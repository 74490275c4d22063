"""The models whose training steps are timed. Imports only JAX and optax, so that starts can be timed too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

OPTIMIZER = optax.adam(1e-3)
N_EXAMPLES = 4096


class Model(NamedTuple):
    """A model, its data, and the examples that a rank takes in a step."""

    name: str
    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    data: Any
    local_batch: int


def models() -> list[Model]:
    """Return an empty model, a short step, and five models, each with a batch of one microbatch."""
    return [
        empty(8),
        perceptron("perceptron", 4),
        perceptron("perceptron", 256),
        conv_net("conv net", 64),
        conv_net("conv net", 256),
        large_matrices("large matrices", 256),
        attention("attention", 8),
        recurrent("recurrent", 32),
    ]


def empty(local_batch: int) -> Model:
    """Return a model with one parameter and one number per example."""
    return Model(
        "empty",
        {"w": jnp.zeros(())},
        lambda params, batch: ((params["w"] - batch["x"]) ** 2).mean(),
        {"x": np.zeros(N_EXAMPLES, np.float32)},
        local_batch,
    )


def conv_net(name: str, local_batch: int) -> Model:
    """Return the conv net of the examples: 78 thousand parameters in 8 leaves, the largest of 216 kB."""
    from _examples import ConvNet  # imports flax

    net = ConvNet(10)
    data = _labeled(np.random.default_rng(0), 8, 8, 1)
    params = jax.jit(net.init)(jax.random.key(0), data["image"][:1])
    return Model(name, params, cross_entropy(net.apply), data, local_batch)


def perceptron(name: str, local_batch: int) -> Model:
    """Return two layers of 256 over 256 inputs: 134 thousand parameters in 6 leaves."""
    return _dense_layers(name, local_batch, [256, 256, 256, 10], jnp.tanh)


def large_matrices(name: str, local_batch: int) -> Model:
    """Return three layers of 512 x 512: 0.8 million parameters, most of them in leaves of 1 MiB."""
    return _dense_layers(name, local_batch, [512, 512, 512, 512, 10], jax.nn.relu)


def _dense_layers(name: str, local_batch: int, widths: list[int], activation: Callable) -> Model:
    rng = np.random.default_rng(0)
    data = _labeled(rng, widths[0])
    params = [_dense(rng, *shape) for shape in itertools.pairwise(widths)]

    def apply(params, x):
        for layer in params[:-1]:
            x = activation(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return Model(name, params, cross_entropy(apply), data, local_batch)


def _labeled(rng: np.random.Generator, *shape: int) -> dict[str, np.ndarray]:
    labels = {"label": rng.integers(0, 10, N_EXAMPLES).astype(np.int32)}
    return {"image": rng.random((N_EXAMPLES, *shape), np.float32)} | labels


def _dense(rng: np.random.Generator, n_in: int, n_out: int) -> dict[str, jax.Array]:
    return {"w": jnp.asarray(rng.normal(size=(n_in, n_out)) / np.sqrt(n_in), jnp.float32), "b": jnp.zeros(n_out)}


def attention(name: str, local_batch: int) -> Model:
    """Return two blocks of attention of 4 heads and width 64, over 32 tokens: 110 thousand parameters in 28 leaves."""
    rng, width, heads, length, words = np.random.default_rng(0), 64, 4, 32, 64
    text = rng.integers(0, words, (N_EXAMPLES, length + 1)).astype(np.int32)
    data = {"image": text[:, :-1], "label": text[:, 1:]}

    def block() -> dict[str, Any]:
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        return {**{k: _dense(rng, *shape) for k, shape in shapes.items()}, "scale": jnp.ones((2, width))}

    params = {
        "embedding": jnp.asarray(rng.normal(size=(words, width)), jnp.float32) * 0.1,
        "position": jnp.asarray(rng.normal(size=(length, width)), jnp.float32) * 0.1,
        "blocks": [block(), block()],
        "head": _dense(rng, width, words),
    }

    def normal(x, scale):
        return scale * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def dense(layer, x):
        return x @ layer["w"] + layer["b"]

    def apply(params, tokens):
        x = params["embedding"][tokens] + params["position"]
        for layer in params["blocks"]:
            qkv = dense(layer["qkv"], normal(x, layer["scale"][0]))
            q, k, v = (t.reshape(*t.shape[:2], heads, -1) for t in jnp.split(qkv, 3, -1))
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x = x + dense(layer["out"], mixed)
            x = x + dense(layer["down"], jax.nn.gelu(dense(layer["up"], normal(x, layer["scale"][1]))))
        return dense(params["head"], x)

    return Model(name, params, cross_entropy(apply), data, local_batch)


def recurrent(name: str, local_batch: int) -> Model:
    """Return a gated recurrent unit of width 96 over 48 steps, in a scan: 43 thousand parameters in 5 leaves."""
    rng, width, length, features = np.random.default_rng(0), 96, 48, 32
    data = _labeled(rng, length, features)
    params = {"gates": _dense(rng, features + width, 3 * width)["w"], "bias": jnp.zeros(3 * width)}
    params |= {"head": _dense(rng, width, 10), "candidate": _dense(rng, width, width)["w"]}

    def apply(params, x):
        def step(h, x):
            update, reset, new = jnp.split(jnp.concatenate([x, h], -1) @ params["gates"] + params["bias"], 3, -1)
            new = jnp.tanh(new + (jax.nn.sigmoid(reset) * h) @ params["candidate"])
            update = jax.nn.sigmoid(update)
            return update * h + (1 - update) * new, None

        h, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], width)), x.swapaxes(0, 1))
        return h @ params["head"]["w"] + params["head"]["b"]

    return Model(name, params, cross_entropy(apply), data, local_batch)


def transformer(
    name: str, local_batch: int, *, layers: int = 6, width: int = 1024, words: int = 32768, length: int = 512
) -> Model:
    """Return a transformer with float32 parameters that computes in bfloat16: by default 110 million parameters."""
    rng, heads, n_examples = np.random.default_rng(0), width // 64, 512
    text = rng.integers(0, words, (n_examples, length + 1)).astype(np.int32)
    data = {"image": text[:, :-1], "label": text[:, 1:]}

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.02)

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = {
        "embedding": normal(words, width),
        "position": normal(length, width),
        "layers": [
            {**{k: normal(*shape) for k, shape in shapes.items()}, "scale": jnp.ones((2, width))} for _ in range(layers)
        ],
    }

    def normalized(x, scale):
        y = x.astype(jnp.float32)
        return (scale * y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def apply(params, tokens):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = half["embedding"][tokens] + half["position"]
        for layer in half["layers"]:
            qkv = (normalized(x, layer["scale"][0]) @ layer["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
            q, k, v = jnp.moveaxis(qkv, 2, 0)
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]
            x = x + jax.nn.gelu(normalized(x, layer["scale"][1]) @ layer["up"]) @ layer["down"]
        return (x @ half["embedding"].T).astype(jnp.float32)

    return Model(name, params, cross_entropy(apply), data, local_batch)


def cross_entropy(apply: Callable[..., jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """Return the mean loss of a classifier: `apply(params, images)` are its logits."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return loss_fn
