"""A backward pass in stages, of which each sends a message: the same training as in one."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive import DriverError
from adaptive.base.channel import WhenWaitedFor
from adaptive.extend import StepEvent
from adaptive.graph.planner import Planner
from adaptive.program import overlap as _overlap
from adaptive.program.overlap import overlapped, stages_for
from adaptive.runtime import general_step as _step
from adaptive.runtime.local_world import LocalWorld
from tests.speed import Deadline, limit

COVERS = (
    "adaptive/control/hosts.py",
    "adaptive/graph/stages.py",
    "adaptive/program/overlap.py",
    "adaptive/runtime/general_step.py",
)

FEATURES, LAYERS, EXAMPLES = 12, 4, 60


def mlp():
    keys = jax.random.split(jax.random.key(1), LAYERS)
    return [{"b": jnp.zeros(FEATURES), "w": 0.3 * jax.random.normal(k, (FEATURES, FEATURES))} for k in keys]


def mlp_loss(params, batch):
    x = batch["x"]
    for p in params:
        x = jnp.tanh(x @ p["w"] + p["b"][None])
    return jnp.square(x.sum(1) - batch["y"]).mean()


def conv():
    keys = jax.random.split(jax.random.key(2), LAYERS)
    return [{"w": 0.4 * jax.random.normal(k, (3, 2, 2))} for k in keys]


def conv_loss(params, batch):
    x = batch["x"].reshape(len(batch["x"]), -1, 2)
    for p in params:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))
    return jnp.square(x.sum((1, 2)) - batch["y"]).mean()


NETS = {"mlp": (mlp, mlp_loss), "conv": (conv, conv_loss)}


def data(spoiled=()):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(EXAMPLES, FEATURES)), rng.normal(size=EXAMPLES)
    x[list(spoiled)] = np.nan
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def training(loss, see=lambda control, values: None, noise=True):
    """SGD, with seconds that are measured once per worker, and a noise scale."""

    def driver(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        reduced = comm.all_reduce(grads)
        metrics = {"loss": comm.all_reduce(value), "seconds": comm.all_gather(mon.compute_seconds())}
        if noise:
            metrics["noise"] = mon.noise_scale(grads, reduced)
        ctrl.hook(see, metrics["loss"])
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, reduced), metrics

    return driver


def built(net="mlp", world=None, see=lambda control, values: None, spoiled=(), noise=False, **options):
    params, loss = NETS[net]
    options = {"global_batch": 12, "deterministic": True, "resizable": False, **options}
    return ad.Program(training(loss, see, noise), params(), data(spoiled), world=world or LocalWorld(3), **options)


def close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("net", "world", "options"),
    [
        ("mlp", lambda: LocalWorld(3), {}),
        ("mlp", lambda: LocalWorld(3), {"microbatch": 2, "shares": (5, 1, 0), "noise": True}),
        ("conv", lambda: comm.DeviceWorld(jax.devices()[:2]), {"microbatch": 4, "shares": (2, 1)}),
        ("conv", lambda: LocalWorld(1), {"microbatch": 5}),
    ],
    ids=["calls alone", "several calls, one worker without", "devices", "one worker"],
)
def test_it_trains_as_in_one_piece(net, world, options):
    results = []
    for stages in (False, 3):
        seen = []
        with built(net, world(), lambda control, loss: seen.append(float(loss)), overlap=stages, **options) as program:  # noqa: B023
            reports = [program.step() for _ in range(4)]
            assert {r.messages for r in reports} == {stages or 1}
            metrics = [(r.metrics["loss"], r.metrics.get("noise", 0.0)) for r in reports]
            results.append((program.state, metrics, seen))
    close(results[1], results[0])


def test_other_sizes_are_cut_alike():
    sizes = (12, 16)
    states = []
    for stages in (False, 2):
        with built(world=LocalWorld(2), overlap=stages, resizable=True) as program:
            for size in sizes:
                program.rescale(global_batch=size)
                program.step()
            states.append(program.state)
    close(states[1], states[0])


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_gradients_of_the_last_layers_are_sent_first():
    with built(overlap=LAYERS) as program:
        plan = program.plan
    first = {c.name for c in plan.messages[0]}
    assert "[3]['w']" in first
    assert "[0]['w']" not in first
    assert "[0]['w']" in {c.name for c in plan.messages[-1]}
    stages = plan.stages[0]
    assert len(stages) == len(plan.messages) == LAYERS
    assert [m.stage for m in plan.messages] == list(range(LAYERS))
    heavy = [[e for e in s.segment.eqns if e.primitive.name == "dot_general"] for s in stages]
    whole = [e for e in plan.microbatches[0].eqns if e.primitive.name == "dot_general"]
    assert sorted(id(e) for found in heavy for e in found) == sorted(map(id, whole))  # each once
    assert all(heavy)
    assert program._parts.engine.layouts[-1].status
    assert not any(layout.status for layout in program._parts.engine.layouts[:-1])


def test_squares_of_gradients_are_summed_where_the_gradients_are():
    with built(overlap=2, noise=True) as program:
        first, second = program.plan.stages[0]
    sent = {c.value for c in program.plan.messages[0]}
    assert second.takes  # sums and residuals
    assert {v for v in sent if v.aval.size > 1}.isdisjoint(first.segment.outputs)


def test_explain_lists_the_stages():
    with built(overlap=2) as program:
        text = program.explain()
    assert "stage 1 of 2, then message 1:" in text
    assert "stage 2 of 2, then message 2:" in text
    assert "overlap  on: overlap=2" in text


def in_a_loop(params, batch):
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"][None]), None

    x = jax.lax.scan(layer, batch["x"], params)[0]
    return jnp.square(x.sum(1) - batch["y"]).mean()


def with_an_order(params, batch):
    jax.debug.print("{}", batch["y"].sum(), ordered=True)
    return mlp_loss(params, batch)


def stacked():
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *mlp())


@pytest.mark.parametrize(("loss", "params"), [(in_a_loop, stacked), (with_an_order, mlp)])
def test_drivers_without_a_place_to_cut(loss, params, capsys):
    def driver(params, batch):
        grads = comm.all_reduce(jax.grad(loss)(params, batch))
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), {}

    with ad.Program(driver, params(), data(), global_batch=12, overlap=True) as program:
        assert "overlap  off: overlap=True, but the driver has no stages" in program.explain()
        assert program.step().messages == 1


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_that_is_skipped_at_its_first_message():
    with built(overlap=2, nonfinite="skip", spoiled=(7,)) as program:
        reports = [program.step() for _ in range(EXAMPLES // 12)]
        assert sorted(r.messages for r in reports) == [1, 2, 2, 2, 2]  # nothing is sent behind bad news
        (skipped,) = [r for r in reports if r.messages == 1]
        assert skipped.skipped
        assert not any(r.skipped for r in reports if r is not skipped)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(program.state))


def test_the_culprit_is_found_in_stages_too():
    with built(overlap=2, spoiled=range(EXAMPLES)) as program, pytest.raises(ad.NonFiniteError, match=r"batch\['x'\]"):
        program.step()


def test_check():
    with built(overlap=2, deterministic=False) as program:
        program.step()
        assert program.check()


class Beside:
    """A channel that passes the computation beside each message to `computes`, before the exchange."""

    def __init__(self, channel, computes):
        self._channel, self._computes = channel, computes

    def exchange(self, *message):
        return self.start(*message).wait()

    def start(self, parts, status, about="", more="", look=None, step=0, beside=None):
        def exchange():
            self._computes(beside)
            return self._channel.exchange(parts, status, about, more, look, step)

        return WhenWaitedFor(exchange)


class SlowWorld(LocalWorld):
    """Each message takes 1000 seconds by a simulated clock, during which other stages are computed."""

    SECONDS = 1000.0

    def __init__(self, size, monkeypatch):
        super().__init__(size)
        self._passed, clock = 0.0, time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + self._passed)

    def channel(self, *layout):
        return Beside(super().channel(*layout), self.computes)

    def computes(self, beside):
        deadline = Deadline(60)
        while beside and beside():
            assert deadline.left()
            time.sleep(0.001)
        self._passed += self.SECONDS


def test_seconds_of_workers_have_no_exchange_in_them(monkeypatch):
    with built(world=SlowWorld(2, monkeypatch), overlap=3) as program:
        events: list[StepEvent] = []
        program.subscribe(events.append)
        reports = [program.step() for _ in range(3)]
    assert all(r.breakdown.exchanging >= 3 * SlowWorld.SECONDS for r in reports)
    assert all(max(r.compute_seconds) < SlowWorld.SECONDS for r in reports)
    assert all(r.breakdown.computing < SlowWorld.SECONDS for r in reports)
    busy = [event.workers.busy for event in events]
    assert all((seconds > 0).all() for seconds in busy)
    assert all(seconds.max() < SlowWorld.SECONDS for seconds in busy)


class TellingWorld(LocalWorld):
    """Notes of each message whether something is computed beside it, and whether that comes to an end."""

    def __init__(self):
        super().__init__(1)
        self.asked, self.noted, self.calls = threading.Event(), threading.Event(), []

    def channel(self, *layout):
        return Beside(super().channel(*layout), self.computes)

    def computes(self, beside):
        if beside is None:
            self.calls.append(None)
            return
        began = beside()
        self.asked.set()
        assert self.noted.wait(limit(60))
        self.calls.append((began, beside()))


def test_worlds_learn_which_computation_overlaps_a_message(monkeypatch):
    """The end of the second stage is noted after the world's query, whenever XLA has computed it."""
    world = TellingWorld()
    waiting = _step.GeneralStep._start_waiting

    def wait_beside(run, sent):
        first, [second] = waiting(run, sent)
        noted = Future()

        def note():
            assert world.asked.wait(limit(60))
            noted.set_result(second.result())
            world.noted.set()

        threading.Thread(target=note, daemon=True).start()
        return [first, [noted]]  # of each stage, for the one worker

    monkeypatch.setattr(_step.GeneralStep, "_start_waiting", wait_beside)
    with built(world=world, overlap=2, resizable=False) as program:
        program.step()
    assert world.calls == [(True, False), None]


def test_a_trace_shows_each_stage(tmp_path):
    path = tmp_path / "trace.json"
    with built("conv", LocalWorld(2), global_batch=8, overlap=2) as program:
        program.step()
        program.trace(path, steps=2)
        for _ in range(3):
            program.step()
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names.count("4 examples, stage 1 of 2") == names.count("4 examples, stage 2 of 2") == 2 * 2


# --- where it pays ----------------------------------------------------------------------------------------------------


class TwoProcesses(LocalWorld):
    """As if of two processes, whose messages take long."""

    processes = 2

    def __init__(self, seconds):
        super().__init__(2)
        self.seconds, self.exchanged = seconds, 0

    def exchange(self, *message, **options):
        time.sleep(self.seconds)
        self.exchanged += 1
        return super().exchange(*message, **options)


def decide(world, wanted="auto", hosts=2, deterministic=False):
    loss = mlp_loss

    def driver(params, batch):
        return jax.tree.map(lambda p, g: p - g, params, comm.all_reduce(jax.grad(loss)(params, batch))), {}

    shapes = jax.eval_shape(mlp)
    planner = Planner(driver, shapes, lambda n: jax.tree.map(lambda a: _rows(n, a), data()), capacity=world.size)
    planner.begin(4)
    found = overlapped(planner, world, wanted, hosts=hosts, deterministic=deterministic, about="a message")
    assert (planner.reference.stages.keys(), planner(2).stages.keys()) == (found.stages.keys(),) * 2
    return found


def _rows(n, leaf):
    return jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype)


@pytest.fixture
def any_size(monkeypatch):
    """Small messages are measured too."""
    monkeypatch.setattr(_overlap, "_LEAST_BYTES", 0)


def test_between_hosts_slow_messages_are_cut(any_size):
    found = decide(world := TwoProcesses(0.06))
    assert world.exchanged
    assert len(found.stages[0]) == _overlap.MOST_STAGES
    assert "between 2 hosts" in found.in_words


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hosts": 1}, "off: all processes are on one host"),
        ({"deterministic": True}, "off: deterministic=True"),
        ({"wanted": False}, "off: overlap=False"),
    ],
)
def test_elsewhere_nothing_is_measured(any_size, options, why):
    found = decide(world := TwoProcesses(0.06), **options)
    assert not world.exchanged
    assert not found.stages
    assert found.in_words.startswith(why)


def test_small_messages_are_not_measured():
    found = decide(world := TwoProcesses(0.06))
    assert not world.exchanged
    assert found.in_words == "off: messages are small"


def test_fast_messages_are_not_cut(any_size, monkeypatch):
    monkeypatch.setattr(_overlap, "LEAST_SECONDS", 60.0)
    found = decide(world := TwoProcesses(0.0))
    assert world.exchanged
    assert not found.stages


def test_a_number_of_stages_holds_anywhere():
    assert len(decide(TwoProcesses(0.0), 3, hosts=1).stages[0]) == 3
    assert len(decide(LocalWorld(1), True, hosts=1).stages[0]) == _overlap.MOST_STAGES
    assert decide(LocalWorld(1)).in_words == ""


def test_how_many_stages():
    assert [stages_for(seconds) for seconds in (0.01, 0.025, 0.035, 0.05, 3.0)] == [2, 2, 3, 4, 4]


@pytest.mark.parametrize("value", ["on", 0, 1, -2, 2.5, None])
def test_a_bad_value(value):
    with pytest.raises(DriverError, match='must be "auto", True, False, or a number of stages'):
        built(overlap=value)


def test_local_and_conditional_messages_go_with_the_last_stage():
    def driver(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        own = state["own"] + comm.local_mean(loss)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], comm.all_reduce(grads))
        own = comm.all_reduce(own, when=ad.step() % 2 == 1)
        return {"params": params, "own": own}, {"loss": comm.all_reduce(loss)}

    states = []
    for stages in (False, 2):
        state = {"params": mlp(), "own": jnp.zeros(())}
        options = {
            "world": LocalWorld(2),
            "per_worker_state": lambda s: s["own"],
            "overlap": stages,
            "resizable": False,
        }
        with ad.Program(driver, state, data(), global_batch=12, **options) as program:
            sent = [program.step().messages for _ in range(4)]
            assert sent == [1 + bool(stages), 2 + bool(stages)] * 2
            states.append(program.state)
    close(states[1], states[0])
