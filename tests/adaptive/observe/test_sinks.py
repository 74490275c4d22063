"""Sinks write all steps however a run ends, and a run continues whatever a sink does."""

from __future__ import annotations

import csv
import io
import logging
import re
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.base.decision import Decision
from adaptive.base.process import exit_hooks
from adaptive.observe import sinks as _sinks
from adaptive.observe.events import HookValues
from adaptive.observe.scalars import Noise, noise_of
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive import event_files
from tests.adaptive.drivers import event, make_data
from tests.speed import limit

ROOT = Path(__file__).resolve().parents[3]


def noise_hook(*values):
    return HookValues("0/adapt", 1, ("noise.scale", "noise.trace", "noise.lower", "noise.upper"), list(values))


@pytest.fixture(scope="module")
def program():
    def adapt(control, noise):
        if control.step % 3 == 0:
            control.rescale(global_batch=4)

    def driver(state, batch):
        mean = comm.all_reduce(batch["y"].mean())
        ctrl.hook(adapt, mon.NoiseScale(mean + 7, mean, mean, mean + 1, mean + 9))
        return state + mean, {"loss": mean}

    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(2), deterministic=True) as program:
        program.step()
        yield program


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))


class Kept:
    """A user's own sink."""

    def __init__(self):
        self.steps, self.restored, self.logged, self.threads, self.closed = [], [], [], set(), 0

    def write(self, event):
        self.steps.append(event.report.step)
        self.restored.append(event.restored)
        self.logged.append(dict(event.logged))
        self.threads.add(threading.current_thread())

    def close(self):
        self.closed += 1


# --- to sinks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_all_steps_are_written_however_the_loop_ends(program, tmp_path, error):
    first = program.steps + 1
    with pytest.raises(error) if error else nullcontext():
        for report in program.run(log=[ad.log.CSV(tmp_path / "new" / "run.csv"), ad.log.JSONL(tmp_path / "run.jsonl")]):
            if report.step == first + 2:
                if error:
                    raise error
                break
    rows = rows_of(tmp_path / "new" / "run.csv")
    assert [int(row["step"]) for row in rows] == [first, first + 1, first + 2]
    assert ad.log.read(tmp_path / "run.jsonl")["step"].tolist() == [first, first + 1, first + 2]


class Failing(Kept):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def write(self, event):
        super().write(event)
        if len(self.steps) == self.at:
            raise ZeroDivisionError("no")

    def close(self):
        super().close()
        if not self.at:
            raise OSError("no room")


def test_sinks_get_every_step_from_one_thread_and_those_that_fail_are_disabled(program, caplog):
    well, failing, torn, first = Kept(), Failing(at=2), Failing(at=0), program.steps + 1
    with caplog.at_level(logging.WARNING, "adaptive"):
        list(program.run(steps=4, log=[failing, well, torn]))
        list(program.run(steps=2, log=well))
    assert well.steps == list(range(first, first + 6))
    assert (len(failing.steps), well.closed, failing.closed, torn.closed) == (2, 2, 1, 1)
    assert {thread.name for thread in well.threads} == {"adaptive-log"}
    assert [re.sub(" object at 0x[0-9a-f]+", "", record.message) for record in caplog.records] == [
        "sink <tests.adaptive.observe.test_sinks.Failing> failed, and is disabled: ZeroDivisionError('no')",
        "sink <tests.adaptive.observe.test_sinks.Failing> failed, and is disabled: OSError('no room')",
    ]
    assert not program._parts.listeners.any


@pytest.mark.parametrize(("kind", "path"), [(ad.log.CSV, "/dev/null/run"), (ad.log.JSONL, "/dev/full")])
def test_the_run_continues_if_a_log_cannot_be_written(program, tmp_path, kind, path, caplog):
    with caplog.at_level(logging.WARNING, "adaptive"):
        assert len(list(program.run(steps=2, log=kind(tmp_path / path)))) == 2
    (record,) = caplog.records
    assert f"sink {kind.__name__}(" in record.message
    assert "Error" in record.message


def test_a_sink_that_hangs_does_not_block_the_run_or_its_end(program, monkeypatch, caplog):
    monkeypatch.setattr(_sinks, "_SECONDS_TO_END", 0.05)
    monkeypatch.setattr(_sinks, "_MOST_WAITING", 2)
    let_go = threading.Event()

    class Hangs(Kept):
        def write(self, event):
            super().write(event)
            let_go.wait(limit(30))

    sink = Hangs()
    with caplog.at_level(logging.WARNING, "adaptive"):
        for number, _ in enumerate(program.run(steps=8, log=[sink])):
            if number == 6:
                program.checkpoint()  # waits for the logs, but not long
    assert len(sink.steps) == 1
    let_go.set()
    assert "cannot keep up" in caplog.text
    assert "hung for" in caplog.text


class Ranked(LocalWorld):
    """A world in which this process gets another rank, as when others are lost."""

    rank = 1


def test_the_next_rank_0_writes_the_last_steps_again():
    world, sink = Ranked(2), Kept()
    thread = _sinks.SinkThread([sink], world)
    for each in [*map(event, range(1, 301)), replace(event(298), restored=True), event(299)]:
        thread(each)
    thread.log({"val": 3.0}, 299)
    world.rank = 0
    thread(event(300))
    thread.close()
    assert sink.steps == [298, 299, 300]
    assert sink.logged == [{}, {"val": 3.0}, {}]
    assert not any(sink.restored)  # the former rank 0 has written it


@pytest.mark.parametrize("log", ["runs/a", [print], 7, ad.log.CSV])
def test_an_object_that_is_no_sink_is_refused(program, log):
    with pytest.raises(ad.DriverError, match=r"log= takes sinks, which have write\(event\) and close\(\); got"):
        next(program.run(log=log))


def test_a_script_with_an_uncaught_error_writes_all_steps(tmp_path):
    """The error leaves the run's generator alive."""
    script = textwrap.dedent(
        """
        import sys
        import adaptive as ad, collectives as comm
        from adaptive.runtime.local_world import LocalWorld
        import numpy as np

        def driver(state, batch):
            return state + comm.all_reduce(batch.mean()), {}

        program = ad.Program(driver, 0.0, np.ones(8), global_batch=4, world=LocalWorld(2), resizable=False)
        run = program.run(log=[ad.log.JSONL(sys.argv[1])])
        for _ in range(3):
            next(run)
        1 / 0
        """
    )
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 1, done.stderr
    assert ad.log.read(path)["step"].tolist() == [1, 2, 3]


def test_exit_hooks_run_once_if_one_raises():
    said = []
    exit_hooks.register_exit_hook(lambda: said.append("first"))
    exit_hooks.register_exit_hook(lambda: 1 / 0)
    exit_hooks.register_exit_hook(lambda: said.append("taken back"))()
    exit_hooks.run_exit_hooks()
    exit_hooks.run_exit_hooks()
    assert said == ["first"]


# --- scalars ----------------------------------------------------------------------------------------------------------


def test_scalars_of_a_step():
    known = {"lr": 0.125, "scales": [1.0, 2.0]}
    found = ad.log.scalars(event(hooks=[noise_hook(50.0, 1.0, 40.0, np.nan)], hyperparameters=known))
    assert found.pop("hyperparameter/lr") == 0.125
    assert found.pop("loss") == 1.0
    assert found.pop("epoch") == 0.1
    assert found == {
        "examples": 4,
        "seconds": 0.5,
        "examples_per_second": 8.0,
        "global_batch": 4,
        "workers": 2,
        "batch_size/0": 2,
        "batch_size/1": 2,
        "seconds/input": 0.1,
        "seconds/computing": 0.2,
        "seconds/exchanging": 0.1,
        "seconds/waiting": 0.05,
        "seconds/hooks": 0.0,
        "seconds/compiling": 0.0,
        "seconds/other": 0.05,
        "noise/scale": 50.0,
        "noise/lower": 40.0,
    }


@pytest.mark.parametrize(
    ("metrics", "hooks", "found"),
    [
        ({"n": mon.NoiseScale(5.0, 1.0, 1.0, 4.0, 8.0)}, [], Noise(5.0, 4.0, 8.0)),
        ({"noise": 5.0}, [noise_hook(6.0, 1.0, 5.0, 9.0)], Noise(6.0, 5.0, 9.0)),
        ({"noise": mon.NoiseScale(5.0, 1.0, 1.0, 4.0, 8.0)}, [noise_hook()], Noise(*[np.nan] * 3)),  # it was skipped
        ({"noise": 5.0}, [], Noise(5.0, np.nan, np.nan)),
        ({"loss": 1.0}, [HookValues("0/x", 1, ("a.scale", "b.lower", "b.upper"), [1, 2, 3])], None),
    ],
)
def test_the_noise_scale_is_known_by_its_fields(metrics, hooks, found):
    assert noise_of(event(metrics=metrics, hooks=hooks)) == (found and pytest.approx(found, nan_ok=True))


def test_scalars_are_the_single_real_numbers_among_the_metrics():
    metrics = {
        "loss": jnp.float32(0.5),
        "half": jnp.bfloat16(0.25),
        "count": jnp.int32(3),
        "rows": jnp.ones(2),
        "wave": jnp.complex64(1j),
        "key": jax.random.key(0),
        "nested": [1.5, True],
    }
    scalars = event(metrics=metrics).scalars
    assert scalars == {"count": 3.0, "half": 0.25, "loss": 0.5, "nested.0": 1.5, "nested.1": 1.0}
    assert {type(x) for x in scalars.values()} == {float}


def test_a_step_is_described_in_lines():
    decision = Decision(global_batch=8, shares=(0.75, 0.25), stop=True, hyperparameters={"lr": 0.5})
    lines = ad.log.describe(event(decision=decision, joined=(1,), lost=("rank 1", "rank 2"), notes=["clipped"]))
    assert lines == [
        "decision: a global batch of 8, a split of 75 % : 25 %, lr = 0.5 and the end of the run",
        "a worker has joined in worker slot 1",
        *("lost: rank 1", "lost: rank 2", "clipped"),
    ]
    assert ad.log.describe(event(decision=Decision())) == []


# --- formats ----------------------------------------------------------------------------------------------------------


def test_a_table_has_the_columns_of_its_first_row(tmp_path, caplog):
    path = tmp_path / "run.csv"
    sink = ad.log.CSV(path)
    sink.write(event(1, {"loss": 1.0, "step": 9.0}, notes=['a "note", of two\nlines']))
    with caplog.at_level(logging.WARNING, "adaptive"):
        for step in (2, 3):
            sink.write(event(step, {"accuracy": 0.5} | ({"loss": 2.0} if step == 2 else {})))
    sink.close()
    (record,) = caplog.records
    assert (
        "run.csv has no column for accuracy. In a new file, name it beforehand:  ad.log.CSV(path, columns=['accuracy'])"
        in record.message
    )
    assert [row["loss"] for row in rows_of(path)] == ["1.0", "2.0", ""]
    assert (rows_of(path)[0]["notes"], rows_of(path)[0]["step"]) == ("a 'note'; of two lines", "1")


@pytest.mark.parametrize("cut", [1, 20])
def test_a_row_that_was_cut_has_no_id(tmp_path, cut):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "run.csv"
    for steps in ((1, 2), (2, 3)):
        sink = ad.log.CSV(path)
        for step in steps:
            sink.write(event(step, notes=['a "note", of two\nlines']))
        sink.close()
        if steps[0] == 1:
            path.write_bytes(path.read_bytes()[: -cut - 12])
    table = pandas.read_csv(path).dropna(subset="run_id").drop_duplicates(["run_id", "step"], keep="last")
    assert table["step"].tolist() == [1, 2, 3]
    assert table["loss"].tolist() == [1, 2, 3]


def test_a_noise_scale_has_columns_before_it_is_known(tmp_path):
    path, names = tmp_path / "run.csv", ("noise.scale", "noise.lower", "noise.upper")
    sink = ad.log.CSV(path)
    sink.write(event(1, dict.fromkeys(names, float("nan"))))
    sink.write(event(2, dict(zip(names, (8.0, 4.0, 16.0), strict=True))))
    sink.close()
    assert [row["noise/lower"] for row in rows_of(path)] == ["", "4.0"]


def test_tensorboard_has_a_curve_for_each_scalar_and_notes_as_text(tmp_path):
    sink = ad.log.TensorBoard(tmp_path / "a", every=2)
    for step in (1, 2, 3):
        sink.write(event(step, notes=["clipped"] if step == 3 else [], epoch_ended=step == 3))
    sink.close()
    sink.write(event(4))
    sink.close()
    files = list((tmp_path / "a").iterdir())
    found, texts = {}, []
    for entry in event_files.events(tmp_path / "a"):
        for value in entry.summary.value:
            if value.HasField("tensor"):
                texts.append((entry.step, value.tag, value.tensor.string_val[0].decode()))
            else:
                found.setdefault(value.tag, []).append((entry.step, value.simple_value))
    assert len(files) == 2
    assert found["loss"] == [(2, 2.0), (3, 3.0), (4, 4.0)]
    assert found["batch_size/1"] == [(2, 2.0), (3, 2.0), (4, 2.0)]
    assert [(step, text) for step, _, text in texts] == [(3, "clipped")]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ad.log.CSV("run.csv", columns="val.loss"), r"columns=\['val.loss'\]"),
        (lambda: ad.log.TensorBoard("runs", every=0), "every= is a number of steps, at least 1; got 0"),
    ],
)
def test_arguments_of_a_sink_are_checked(make, why):
    with pytest.raises(ad.DriverError, match=why):
        make()


@pytest.mark.parametrize(
    ("module", "make"), [("tensorboardX", lambda: ad.log.TensorBoard("runs")), ("wandb", lambda: ad.log.WandB())]
)
def test_a_missing_library_raises_when_the_sink_is_built(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ad.DriverError, match=r"pip install"):
        make()
