"""A record as arrays: each number in its row and column, whatever lines leave out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from adaptive.base.errors import RecordError
from adaptive.html_report.columns import read_columns

from .made_up import record, uneven


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run.jsonl"


def test_each_number_is_in_the_row_of_its_step(run):
    """Also of more steps than are collected at once."""
    steps = np.arange(600)
    sizes = np.stack([32 + steps // 250, 16 + 0 * steps], 1)
    metrics = {"loss": np.where(steps % 100 == 7, np.nan, steps), "top": np.where(steps == 9, np.inf, -1.0 * steps)}
    noise = np.stack([steps, steps - 1.0, np.where(steps < 300, np.inf, steps + 1.0)], 1)
    fields = {5: {"skipped": True}, 6: {"seconds": None}, 599: {"lost": ["rank 1"]}, 7: {"notes": ["a note"]}}
    busy = uneven(600, 2, 0.2)
    found = read_columns(record(run, busy, sizes=sizes, metrics=metrics, noise=noise, fields=fields))
    assert (len(found), found.n) == (600, 2)
    assert found.step.tolist() == list(range(1, 601))
    assert found.epoch == pytest.approx(steps / 100)
    assert (found.changes.tolist(), found.changed.tolist()) == ([0, 250, 500], [[32, 16], [33, 16], [34, 16]])
    assert (found.sizes == sizes).all()
    assert (found.global_batch == sizes.sum(1)).all()
    assert (found.examples == sizes.sum(1).cumsum()).all()
    assert found.seconds[5] == 0
    assert np.delete(found.seconds, 5) == pytest.approx(np.delete(busy.max(1), 5))
    assert found.elapsed[-1] == pytest.approx(np.delete(busy.max(1), 5).sum())
    for name, values in metrics.items():
        np.testing.assert_array_equal(found.metrics[name], values)
    np.testing.assert_array_equal(found.noise["noise"], noise)
    assert found.workers["busy"][1:] == pytest.approx(busy[1:], rel=1e-5)
    assert np.isnan(found.workers["busy"][0]).all()  # it contains preparation
    assert found.breakdown.sum(1) == pytest.approx(busy.max(1), rel=1e-5)
    assert np.flatnonzero(found.skipped).tolist() == [4]
    assert [(notice.row, notice.lost, notice.notes) for notice in found.notices] == [
        (6, (), ("a note",)),
        (598, ("rank 1",), ()),
    ]


def test_measurements_of_steps_with_preparation_are_left_out(run):
    fields = {5: {"joined": [1]}, 8: {"restores": 1, "repeated": 0}}
    busy = np.full((9, 2), 0.02)
    busy[2, 0] = np.nan
    found = read_columns(record(run, busy, fields=fields)).workers
    expected = [[0, 0], [1, 1], [0, 1], [1, 1], [1, 0], [1, 1], [1, 1], [0, 0], [1, 1]]
    for name in ("busy", "computing", "input"):
        np.testing.assert_array_equal(np.isfinite(found[name]), np.array(expected, bool))


def test_a_metric_has_no_number_where_a_step_lacks_it(run):
    with_, without = {"metrics": {"loss": 1.0, "late": 2.0}}, {"metrics": {"loss": 3.0}}
    record(
        run,
        np.full((300, 1), 0.02),
        metrics={"loss": np.zeros(300)},
        fields={290: with_, 291: without, 300: {"metrics": None}},
    )
    found = read_columns(run).metrics
    assert found["loss"][[0, 289, 290, 291]].tolist() == [0, 1, 3, 0]
    assert np.isnan(found["loss"][299])
    assert np.flatnonzero(np.isfinite(found["late"])).tolist() == [289]


def test_members_are_listed_where_they_change(run):
    busy = np.full((9, 2), 0.02)
    busy[4:6, 1] = np.nan
    assert read_columns(record(run, busy)).members == ((0, (0, 1)), (4, (0,)), (6, (0, 1)))


def test_a_request_of_the_script_is_a_decision_after_the_step_before(run):
    request = {"script": "program.rescale", "step": 7, "global_batch": 112}
    (notice,) = read_columns(record(run, uneven(9, 2, 0.1), fields={8: {"script": [request]}})).notices
    assert (notice.row, notice.decision) == (6, {**request, "by": ["program.rescale"]})


@pytest.mark.parametrize(
    ("leaves", "scales"),
    [
        (["scale", "lower", "upper"], {"noise scale": [0, 1, 2]}),
        (["x", "a.upper", "a.scale", "b.lower", "a.lower", "b.scale"], {"a": [2, 4, 1]}),
        (["of['c'].scale", "of['c'].lower", "of['c'].upper"], {"of['c']": [0, 1, 2]}),
        (["a.scale", "lower", "upper"], {}),
    ],
)
def test_a_noise_scale_is_known_by_the_names_of_its_parts(run, leaves, scales):
    """Of the first hook that has one of a name."""
    record(run, uneven(9, 2, 0.1), fields={3: {"hooks": {"0/adapt": [10.0 * i for i in range(len(leaves))]}}})
    header, *lines = run.read_text().splitlines()
    hooks = [{"name": f"{i}/adapt", "every": 1, "leaves": leaves} for i in (0, 1)]
    run.write_text("\n".join([json.dumps({**json.loads(header), "hooks": hooks}), *lines]) + "\n")
    found = read_columns(run)
    assert {name: values[2].tolist() for name, values in found.noise.items()} == {
        name: [10.0 * place for place in places] for name, places in scales.items()
    }
    assert all(np.isnan(values[[1, 3]]).all() for values in found.noise.values())


def test_hooks_are_listed_where_none_of_their_numbers_was_known(run):
    noise = np.full((9, 3), np.nan)
    noise[4, 2] = 3.0
    found = read_columns(record(run, uneven(9, 2, 0.1), noise=noise, fields={7: {"hooks": {}}})).unknown
    assert {name: np.flatnonzero(mask).tolist() for name, mask in found.items()} == {"adapt": [0, 1, 2, 3, 5, 7, 8]}
    run.unlink()
    assert read_columns(record(run, uneven(9, 2, 0.1))).unknown == {}  # it receives nothing


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"breakdown": [0.1, 0.2]}, "its steps are inconsistent"),
        ({"batch_sizes": [1, 2, 3]}, "its steps are inconsistent"),
        ({"batch_sizes": None}, "its steps are inconsistent"),
        ({"workers": {}}, ":10: a step without 'input'"),
        ({"hooks": {"0/adapt": [1.0]}}, ":10: not a valid step"),
        ({"joined": [2]}, "its steps are inconsistent"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(run, fields, why):
    record(run, uneven(9, 2, 0.1), noise=np.ones((9, 3)), fields={9: fields})
    with pytest.raises(RecordError, match=why):
        read_columns(run)


@pytest.mark.parametrize(
    ("steps", "wrong", "why"),
    [
        (9, range(1, 10), "its steps are inconsistent: 7 numbers a step are expected"),
        (300, range(1, 301), ":257: not a valid step: 7 numbers a step are expected"),
        (300, [9], ":257: not a valid step"),
    ],
)
def test_a_breakdown_into_other_parts_is_refused(run, steps, wrong, why):
    """At the latest after some hundred steps."""
    record(run, np.full((steps, 1), 0.02), fields={step: {"breakdown": [0.1] * 8} for step in wrong})
    with pytest.raises(RecordError, match=why):
        read_columns(run)
