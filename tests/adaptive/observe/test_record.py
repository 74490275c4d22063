"""A record holds each step once for its readers, through restores, kills and full disks."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.base.activity import WorkerSeconds
from adaptive.base.decision import Decision
from adaptive.base.errors import RecordError
from adaptive.extend import read_run
from adaptive.observe.events import HookValues
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import Recorder, event, make_data

ID, OTHER = "0123456789ab", "ba9876543210"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(path, *steps, run_id=ID, restored=False, **fields):
    """Write steps, as a process does that opens the record; the first one is `restored`."""
    sink = ad.log.JSONL(path)
    for step in steps:
        sink.write(replace(event(step, run_id=run_id, **fields), restored=restored and step == steps[0]))
    sink.close()


def steps_of(path, run=-1, **options):
    return [fields["step"] for _, fields in read_run(path, run, **options).steps]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_lines_are_only_added_and_each_is_on_the_disk_when_it_is_written(path):
    sink, before = ad.log.JSONL(path), b""
    for count, each in enumerate([event(1), event(2), replace(event(1), restored=True)]):
        sink.write(each)
        now = path.read_bytes()
        assert now.startswith(before)
        assert (now[-1:], now.count(b"\n")) == (b"\n", 2 + count)
        before = now
    sink.close()


@pytest.mark.parametrize("cut", [1, 2, 40, 10_000])
def test_a_line_that_was_cut_is_skipped_and_the_next_one_follows_it(path, cut, caplog):
    write(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(len(whole) - cut, whole.rstrip(b"\n").rfind(b"\n") + 5)])
    with caplog.at_level(logging.WARNING, "adaptive"):
        assert steps_of(path) == [1, 2][: 1 + (cut == 1)]
    write(path, 1, run_id=OTHER)  # its header begins a line
    assert steps_of(path) == [1]
    write(path, 2, 3, restored=True)
    assert steps_of(path) == [1, 2, 3]
    assert path.read_bytes().startswith(whole[: len(whole) - min(cut, 40) - 1][:40])


def test_runs_in_one_file_are_distinguished_by_their_ids(path):
    write(path, 1, 2, 3)
    write(path, 1, 2, run_id=OTHER)
    write(path, 3, 4, restored=True)
    assert [read_run(path, number).header["run_id"] for number in (0, 1)] == [OTHER, ID]
    assert (steps_of(path, 0), steps_of(path)) == ([1, 2], [1, 2, 3, 4])
    for run in (2, -3):
        with pytest.raises(RecordError, match=f"holds 2 runs; there is no run {run}"):
            read_run(path, run)


def test_a_repeated_step_comes_once_with_what_the_restores_discarded(path):
    write(path, *range(1, 8))
    write(path, 5, 6, restored=True)
    write(path, 5, 6, 7, 8, restored=True)
    write(path, 3, restored=True)
    *_, (_, last) = read_run(path).steps
    assert (steps_of(path), last["restores"], last["repeated"]) == ([1, 2, 3], 3, 3 + 2 + 6)
    everything = [(f["step"], f["discarded"]) for _, f in read_run(path, discarded=True).steps]
    assert len(everything) == 7 + 2 + 4 + 1
    assert [step for step, discarded in everything if not discarded] == [1, 2, 3]


def test_lines_that_another_rank_writes_again_are_not_repeated_steps(path):
    write(path, 1, 2)
    write(path, 2, 3, restored=True)
    write(path, 2, 3, 4)
    steps = [fields for _, fields in read_run(path, discarded=True).steps]
    assert [(f["step"], f["restores"], f["discarded"]) for f in steps] == [
        (1, 0, False),
        (2, 0, True),
        (2, 1, False),
        (3, 0, False),
        (4, 0, False),
    ]


def test_a_run_with_more_workers_after_a_restart_has_zeros_for_them_before(path):
    write(path, 1, 2, 3)
    write(path, 3, 4, restored=True, sizes=(2, 1, 1))
    found = ad.log.read(path)
    assert found.of_workers("batch_size").tolist() == [[2, 2, 0]] * 2 + [[2, 1, 1]] * 2
    assert found["restores"].tolist() == [0, 0, 1, 0]
    assert found["repeated"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds 0 runs"),
        ("step,loss\n1,2\n", ":1: not a line of a record"),
        ("[1]\n", ":1: not a line of a record"),
        ('{"kind": "stop"}\n', ":1: not a line of a record"),
        ('{"kind": "header", "version": 5}\n', "version 5; this reads 6. Commit [0-9a-f]+ reads version 5"),
        ('{"kind":"step","run_id":"a","step":1,"x":2}\n', "the header of this run is missing"),
        ('{"kind": "header", "version": 6, "run_id": "a", "workers": 1}\n', "the run has no steps"),
    ],
)
def test_a_file_that_is_no_record_is_refused(path, text, why):
    path.write_text(text)
    with pytest.raises(RecordError, match=why):
        ad.log.read(path)


def test_a_line_leaves_out_only_what_it_can_tell(path):
    usual = event(1, sizes=(2, 2, 0))
    asked = usual.asked._replace(active=(0, 1))
    other = replace(event(2, sizes=(2, 0, 2), members=(0, 2)), previous_batch_sizes=(3, 1, 0), asked=asked)
    sink = ad.log.JSONL(path)
    sink.write(usual)
    sink.write(other)
    sink.close()
    names = ("previous_batch_sizes", "members", "asked", "decision", "hyperparameters")
    assert [[fields[name] for name in names] for _, fields in read_run(path).steps] == [
        [[2, 2, 0], [0, 1, 2], {"global_batch": 4, "active": [0, 1, 2], "workers": [3, 3, 3]}, None, {}],
        [[3, 1, 0], [0, 2], {"global_batch": 4, "active": [0, 1], "workers": [3, 3, 3]}, None, {}],
    ]


# --- columns ----------------------------------------------------------------------------------------------------------


def test_columns_have_a_row_for_each_step(path):
    """Also of more steps than are collected at once, and where a value is missing or no number."""
    names = ("noise.scale", "seconds")
    sink = ad.log.JSONL(path)
    for step in range(1, 201):
        values = [np.float32(step), np.array([step, np.nan])] if step != 7 else []
        hooks = [HookValues("0/adapt", 1, names, values, "too little" if step >= 5 else "")]
        metrics = {"loss": np.inf if step == 3 else step / 2} | ({"late": 1.0} if step == 150 else {})
        busy = np.array([0.1, 0.3, 0.0])  # nobody is in the last slot
        workers = WorkerSeconds(0 * busy, busy, busy, np.array([0.2, 0.0, 0.0]))
        known = {"lr": 0.5, "scales": [1.0, 2.0]}
        more = {"hooks": hooks, "workers": workers, "hyperparameters": known, "skipped": step == 7}
        sink.write(event(step, metrics, sizes=(2, 2, 0), **more))
    sink.close()
    found = ad.log.read(path)
    assert {len(column) for column in found.values()} == {200}
    assert found["step"].tolist() == list(range(1, 201))
    assert found["loss"][[1, 2]].tolist() == [1, np.inf]
    assert np.flatnonzero(found["late"] == found["late"]).tolist() == [149]
    assert np.flatnonzero(found["skipped"]).tolist() == [6]
    assert found["seconds/computing"][0] == pytest.approx(0.2)
    assert found.of_workers("waiting")[9] == pytest.approx([0.2, 0.0, 0.0])
    assert found["hook/0/adapt/noise.scale"][[0, 5]].tolist() == [1, 6]
    assert np.isnan(found["hook/0/adapt/noise.scale"][6])
    assert found["hook/0/adapt/seconds"][9] == pytest.approx([10, np.nan], nan_ok=True)
    assert (found["hyperparameter/lr"][8], found["hyperparameter/scales"][8].tolist()) == (0.5, [1, 2])
    assert [(row, why) for row, why in enumerate(found["why"]) if why] == [(4, {"0/adapt": "too little"})]
    assert found.header["hooks"] == [{"name": "0/adapt", "every": 1, "leaves": [*names]}]


def test_columns_are_a_table_for_pandas(path):
    pandas = pytest.importorskip("pandas")
    write(path, 1, 2, 3, notes=["clipped"], lost=("rank 1",), joined=(1,))
    table = pandas.DataFrame(ad.log.read(path))
    assert table.set_index("step")["loss"].to_dict() == {1: 1.0, 2: 2.0, 3: 3.0}
    assert (table["notes"][0], table["lost"][0], table["joined"][0]) == (["clipped"], ["rank 1"], [1])


def test_a_broken_byte_in_an_id_is_another_run(path):
    write(path, 1, 2)
    step = b'"step","run_id":"'
    path.write_bytes(path.read_bytes().replace(step, step + b"\xff", 1))
    assert steps_of(path, 0) == [2]


def test_steps_that_do_not_fit_together_are_refused(path):
    write(path, 1, 2)
    text = path.read_text()
    path.write_text(text.replace('"busy":[1000000,1000000]', '"busy":[1000000]', 1))
    with pytest.raises(RecordError, match="its steps are inconsistent"):
        ad.log.read(path)


# --- of a run ---------------------------------------------------------------------------------------------------------


def test_a_run_is_recorded_with_decisions_and_what_json_has_not(path):
    decided = Decision(shares=np.ones(1, np.float32), notes=("as it was",))
    handler = Recorder(lambda o: decided)

    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        wave = 1j * mean.astype(complex)
        operators.hook("grow", handler, (np.array([np.inf, -np.inf, np.nan]), wave, jnp.stack([wave, wave])), every=2)
        return state + mean, {}

    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(), resizable=False) as program:
        list(program.run(steps=1, record=path))
        list(program.run(steps=1, record=path))
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["header", "step"] * 2
    found = ad.log.read(path)
    assert found["step"].tolist() == [1, 2]
    assert (found["decision"][1]["by"], found["decision"][1]["shares"]) == (["grow"], [1.0])
    assert found["hook/0/grow/value_0"][0] == pytest.approx([np.inf, -np.inf, np.nan], nan_ok=True)
    wave = found["hook/0/grow/value_1"][0]
    assert (wave.real, np.isfinite(wave.imag)) == (0, True)
    assert found["hook/0/grow/value_2"][0].tolist() == [wave, wave]
