"""The model of the examples."""

from __future__ import annotations

import flax.linen as nn
import jax


class ConvNet(nn.Module):
    """A small convolutional net: images, shape=(examples, height, width, 1), to logits, shape=(examples, classes).

    Without batch normalization, each example is independent, so a gradient does not depend on the split of its batch.
    With 10 classes it has 78 thousand parameters for images of 8x8 pixels, 121 thousand for 28x28.
    """

    classes: int

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (3, 3))(image))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2)(x))
        x = nn.relu(nn.Conv(96, (3, 3), strides=2)(x))
        return nn.Dense(self.classes)(x.reshape(len(x), -1))
