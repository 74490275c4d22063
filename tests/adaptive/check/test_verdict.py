"""What differs makes the verdict "no", whatever else is not known; nothing but a full comparison makes it "yes"."""

from __future__ import annotations

import pytest

from adaptive.check.verdict import Invariance


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({}, "yes"),
        ({"reductions": {"grads": 0.1}, "drawn": ("driver.py:3",)}, "yes"),
        ({"note": "no."}, "not known"),
        ({"differences": {"state": 0.25}}, "no"),
        ({"reports": {"metric ['loss']": 0.25}}, "no"),
        ({"wrong_means": {"noise_scale (driver.py:9)": 0.25}}, "no"),
        ({"on_purpose": "each worker's examples are averaged by themselves"}, "no"),
    ],
)
@pytest.mark.parametrize("note", [{}, {"note": "a value is not finite."}])
def test_a_difference_counts_more_than_what_is_not_known(found, verdict, note):
    verdict = "not known" if note and verdict == "yes" else verdict
    invariance = Invariance(**{"splits": (((2,), (2,)),), **note, **found})
    assert invariance.verdict == verdict
    assert bool(invariance) == (verdict == "yes")
    named = [name for values in found.values() if isinstance(values, dict) for name in values]
    text = str(invariance)
    assert all(f"{name}   by 0.25 of its" in text for name in named if verdict == "no")
    assert ("see docs/models.md" in text) == ("drawn" in found and verdict == "no")
