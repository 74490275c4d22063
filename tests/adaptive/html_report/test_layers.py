"""Noise scales of layers: found among metrics and values of hooks, and drawn as one chart."""

from __future__ import annotations

import numpy as np

from adaptive.html_report.layers import is_of_layers, noise_of_layers

from .test_charts import drawn

STEPS = 40
FIELDS = ("scale", "trace", "signal", "lower", "upper")


def metrics(*layers):
    return {f"noise.{name}.{field}": np.full(STEPS, 10.0 + i) for i, name in enumerate(layers) for field in FIELDS}


def test_they_are_found_by_name():
    hooks = {"of['a.b']": np.full((STEPS, 3), 3.0), "of['c']": np.full((STEPS, 3), 4.0), "noise": np.ones((STEPS, 3))}
    found = noise_of_layers({**metrics("first", "last"), "loss": np.ones(STEPS)}, hooks)
    assert {root: list(scales) for root, scales in found.items()} == {"of": ["a.b", "c"], "noise": ["first", "last"]}
    assert found["noise"]["last"][0] == 11
    assert all(is_of_layers(name, found) for name in ("of['c']", "noise.last.lower"))
    assert not any(is_of_layers(name, found) for name in ("noise", "loss", "noise.x.lower"))


def test_a_single_noise_scale_and_other_values_are_no_layers():
    assert noise_of_layers(metrics("first"), {"noise": np.ones((STEPS, 3))}) == {}
    assert noise_of_layers({"a.b.scale": np.ones(STEPS), "a.c.scale": np.ones(STEPS)}, {}) == {}


def test_there_is_one_chart_with_a_line_for_each_layer(tmp_path):
    figures = drawn(tmp_path / "r", STEPS, metrics={**metrics("first", "last", "bias"), "loss": np.ones(STEPS)})
    assert [name for name in figures if "layers" in name or "metric" in name] == ["layers-noise", "metric-15"]
    assert len(figures["layers-noise"].renderers) == 3
