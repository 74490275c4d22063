"""The data and the model of the examples' folder, and a smaller model. Imports flax."""

import sys
from pathlib import Path

import flax.linen as nn
import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _data import load as load
from _models import ConvNet as ConvNet


class SmallConvNet(nn.Module):
    """Two convolutional layers, 21 thousand parameters. A step on 64 examples takes 2 ms on one core."""

    classes: int
    normalized: bool = False  # whether each has a layer normalization

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = image
        for features, size in ((16, 5), (32, 3)):
            x = nn.Conv(features, (size, size), strides=2)(x)
            x = nn.relu(nn.LayerNorm()(x) if self.normalized else x)
        return nn.Dense(self.classes)(x.reshape(len(x), -1))
