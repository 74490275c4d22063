"""Noise scales of layers: found among metrics and values of hooks, and drawn as one chart."""

from __future__ import annotations

import numpy as np

from adaptive.html_report.layers import is_of_layers, noise_of_layers

from .test_charts import drawn, ends, made, of_glyphs

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


def test_the_chart_has_the_scales_of_layers_that_are_known(tmp_path):
    """And says which were least and most at the end."""
    values = metrics("first", "last", "bias")
    values["noise.first.scale"] = np.linspace(100, 1000, STEPS)
    values["noise.last.scale"] = np.where(np.arange(STEPS) < 35, 20.0, np.nan)
    values["noise.bias.scale"] = np.where(np.arange(STEPS) < 30, -1.0, np.inf)
    chart = made(tmp_path / "r", np.full((STEPS, 1), 0.02), metrics=values)["layers-noise"]
    assert chart.title == "Noise scale by layer: noise"
    assert chart.says == "At the end it was least for last, 20, and most for first, 1,000."
    assert [key.name for key in chart.key] == ["first", "last", "bias"]
    assert ends(chart.figure.y_range) == (10, 2000)
    lines = of_glyphs(chart, "Line")[0]
    np.testing.assert_allclose(lines["layer_0"], values["noise.first.scale"])
    np.testing.assert_array_equal(lines["layer_1"], values["noise.last.scale"])
    assert not np.isfinite(lines["layer_2"]).any()
    unknown = {name: np.full(STEPS, np.nan) for name in metrics("first", "last")}
    assert "layers-noise" not in made(tmp_path / "s", np.full((STEPS, 1), 0.02), metrics=unknown)
