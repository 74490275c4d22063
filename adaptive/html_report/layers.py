"""The noise scales of layers in a recorded run: values of one name whose parts are noise scales."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

_FIELDS = ("scale", "trace", "signal", "lower", "upper")
_ITEM = re.compile(r"^(?P<root>.*?)\['(?P<layer>.*)'\]$")


def noise_of_layers(
    metrics: Mapping[str, np.ndarray], noise: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
    """Return the scales by layer, by the name of the value; each shape=(T,).

    Args:
      metrics: metrics by name: `layers.first.scale`.
      noise: noise scales that hooks received, with their bounds, by name: `layers['first']`; shape=(T, 3).
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, values in noise.items():
        match = _ITEM.match(name)
        if match:
            found.setdefault(match["root"] or "layers", {})[match["layer"]] = values[:, 0]
    for name, values in metrics.items():
        root, _, layer = name.removesuffix(".scale").partition(".")
        if layer and all(f"{root}.{layer}.{field}" in metrics for field in _FIELDS):
            found.setdefault(root, {})[layer] = values
    return {root: scales for root, scales in found.items() if len(scales) > 1}


def is_of_layers(name: str, layers: Mapping[str, Mapping[str, np.ndarray]]) -> bool:
    """Return whether a metric, or a noise scale that a hook received, is part of the noise scales of layers."""
    match = _ITEM.match(name)
    if match:
        return match["layer"] in layers.get(match["root"] or "layers", {})
    root, _, rest = name.partition(".")
    layer, _, field = rest.rpartition(".")
    return field in _FIELDS and layer in layers.get(root, {})
