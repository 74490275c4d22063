"""Recorded runs: read back, shown to policies again, and turned into clusters."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.extend import RecordError
from adaptive.runtime.local_world import LocalWorld
from controllers.simulate import (
    Cluster,
    fit,
    jitter,
    read_trace,
    replay,
    simulate,
    stages,
)


def write(path, simulation, hooks=(("0/balance", 1),), leaves=None, wall=0.0, names=None):
    """A trace as `Program.run` would have written it; `names` are those of hooks' leaves that are not just seconds."""
    n, run_id = simulation.sizes.shape[1], str(path.stat().st_size if path.exists() else 0)
    header = {"kind": "header", "version": 6, "run_id": run_id, "workers": n, "examples": 1000, "seed": 0,
              "global_batch": 1, "lower": [1] * n, "upper": [10**6] * n, "quantum": 1,
              "hooks": [{"name": name, "every": every, "leaves": (names or {}).get(name, ["seconds"])}
                        for name, every in hooks]}  # fmt: skip
    asked, before, lines = dict(simulation.decisions), [None] * n, [header]
    for k, (sizes, seconds) in enumerate(zip(simulation.sizes.tolist(), simulation.seconds.tolist(), strict=True)):
        decision = asked.get(k + 1)
        given = leaves(k, before) if leaves else {name: [before] for name, _ in hooks}
        lines.append(
            {"kind": "step", "run_id": run_id, "step": k + 1, "epoch": 0.0, "batch_sizes": sizes,
             "previous_batch_sizes": simulation.sizes[max(k - 1, 0)].tolist(), "seconds": max(seconds) + wall,
             "message_bytes": 0, "notes": [], "hooks": given, "call": 0.0,
             "asked": {"global_batch": sum(sizes), "workers": [n, n, n]},
             "decision": decision and {"global_batch": decision.global_batch, "shares": decision.shares, "stop": False,
                                       "workers": None, "hyperparameters": {}}}
        )  # fmt: skip
        before = seconds
    with path.open("a") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "trace.jsonl"


def test_a_run_whose_workers_follow_a_noise_scale_replays_to_the_same_decisions(trace):
    """Observations have the requests, and not their outcome."""
    policy = ctrl.noise_workers(8)

    def driver(w, batch):
        grad = comm.all_reduce(jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w))
        ctrl.hook(policy, 8.0 + 3 * ad.step_number().astype(float), every=2)
        return w - 0.1 * grad, {}

    data = {"x": np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)}
    world = LocalWorld(4, workers=1)
    with ad.Program(driver, jnp.ones(3), data, global_batch=8, world=world, deterministic=True) as program:
        reports = list(program.run(steps=12, record=trace))
    asked = [(r.step, r.decision.workers, r.decision.global_batch) for r in reports if r.decision]
    assert len(asked) >= 3
    assert reports[-1].members == (0, 1, 2, 3)
    recording = read_trace(trace)
    (hook,) = recording.hooks
    assert [(step, d.workers, d.global_batch) for step, d in replay(policy, recording, hook)] == asked
    cluster = replay(ctrl.noise_batch(max_batch=16), recording, hook)
    assert all(decision.workers is None and decision.global_batch <= 16 for _, decision in cluster)


def test_a_batch_that_grows_and_a_hook_without_values_replay_to_the_same_decisions(trace):
    """Batches are multiples of a quantum that follows the batch."""
    policies = {2: ctrl.noise_batch(), 5: ctrl.published.static_proportional([1, 2])}

    def driver(w, batch):
        ctrl.hook(policies[2], 90.0 * ad.step_number().astype(float), every=2)
        ctrl.hook(policies[5], every=5)
        return w + comm.all_reduce(batch["x"].mean()), {}

    data = {"x": np.ones(2048, np.float32)}
    with ad.Program(driver, jnp.ones(()), data, global_batch=64, world=LocalWorld(2), deterministic=True) as program:
        reports = list(program.run(steps=9, record=trace))
    recording = read_trace(trace)
    assert reports[-1].global_batch > 500
    for (every, policy), hook in zip(policies.items(), recording.hooks, strict=True):
        asked = [(r.step, r.decision) for r in reports if r.decision and r.step % every == 0]
        again = replay(policy, recording, hook)
        assert [(step, d.global_batch, d.shares) for step, d in again] == [
            (step, d.global_batch, d.shares) for step, d in asked
        ]
        assert asked


def test_a_hooks_values_are_known_by_their_names(trace):
    simulation = simulate(ctrl.balance(), Cluster(ctrl.timing.BatchTime(np.ones(2))), 8, 3)
    hooks = [("0/noise_batch", 20), ("1/lb_bsp", 1), ("2/mine", 1), ("3/noise_batch", 1)]

    def leaves(k, seconds):
        noise = [float(k), 1.0, 1.0, None if k == 0 else 5.0, "inf"]
        return {"0/noise_batch": noise, "1/lb_bsp": [seconds, [0.5, 0.25]], "2/mine": [1.5], "3/noise_batch": [7.0]}

    names = {
        "0/noise_batch": [f"noise.{field}" for field in mon.NoiseScale._fields],
        "1/lb_bsp": ["seconds", "cpu_available"],
        "2/mine": ["value_0"],
        "3/noise_batch": ["noise_scale"],
    }
    write(trace, simulation, hooks, leaves, names=names)
    recording = read_trace(trace)
    step = recording.steps[2]
    assert recording.signals("0/noise_batch", step)["noise_scale"] == (2.0, 5.0, np.inf)
    assert np.isnan(recording.signals("0/noise_batch", recording.steps[0])["noise_scale"].lower)
    assert recording.signals("3/noise_batch", step)["noise_scale"] == (7.0, 7.0, 7.0)
    assert recording.signals("2/mine", step) == {"value_0": 1.5}
    np.testing.assert_array_equal(recording.signals("1/lb_bsp", step)["cpu_available"], [0.5, 0.25])
    np.testing.assert_array_equal(recording.series("cpu_available"), [[0.5, 0.25]] * 3)
    assert recording.series("memory_available") is None

    seen = []
    policy = ctrl.Policy(lambda n: (), lambda o, s: (seen.append(o.values), (None, s))[1], "mine")
    replay(policy, recording, "2/mine")
    assert seen == [(1.5,)] * 3
    with pytest.raises(RecordError, match=r"reads memory_available, but hook '1/lb_bsp' received seconds, cpu_avail"):
        replay(policy, recording, "1/lb_bsp", reads=("seconds", "memory_available"))
    with pytest.raises(RecordError, match=r"this run has no hook 'balance'; its hooks are: 0/noise_batch"):
        replay(policy, recording, "balance")
    with pytest.raises(ad.DriverError, match="one time per worker"):
        replay(ctrl.balance(), recording, "2/mine")


# --- clusters that would have behaved so ------------------------------------------------------------------------------


def recorded(trace, times, slowdown=None, noise=None, steps=200, wall=0.0):
    """A run in which sizes change now and then."""
    rng = np.random.default_rng(3)
    asked = {k: ad.Decision(shares=tuple(rng.uniform(0.5, 1.5, 3))) for k in range(9, steps, 23)}
    policy = ctrl.Policy(lambda n: (), lambda o, s: (asked.get(o.step), s))
    simulation = simulate(policy, Cluster(times, slowdown, noise), 300, steps)
    write(trace, simulation, wall=wall)
    return simulation, fit(read_trace(trace))


def test_a_fitted_cluster_takes_the_recorded_time_for_the_recorded_sizes(trace):
    times = ctrl.timing.BatchTime(np.array([1e-3, 2e-3, 3e-3]), np.array([0.1, 0.0, 0.05]))
    simulation, fitted = recorded(trace, times, stages({0: 1.0, 90: (1, 3, 1)}, 3), jitter(0.05), wall=0.25)
    again = fitted.cluster
    noise = again.noise(np.random.default_rng(), 200, 3)
    for k in (0, 50, 89, 90, 150):
        seconds = again.times(simulation.sizes[k]) * again.slowdown(k + 1, 0.0) * noise[k]
        np.testing.assert_allclose(seconds, simulation.seconds[k])
    assert again.overhead == pytest.approx(0.25)
    assert fitted.certain.all()


def test_a_fitted_cluster_has_the_workers_of_each_recorded_step_and_then_of_the_last(trace):
    cluster = Cluster(
        ctrl.timing.BatchTime(np.ones(3), np.zeros(3)), present=lambda step: np.arange(3) < 2 + (step > 20)
    )
    ran = simulate((), cluster, 60, 40)
    write(trace, ran)
    present = fit(read_trace(trace)).cluster.present
    assert [present(step).tolist() for step in (1, 20, 21, 40, 90)] == [[True, True, False]] * 2 + [[True] * 3] * 3


@pytest.mark.parametrize("noise", [None, jitter(0.05)])
def test_nonlinear_costs_are_distinguished_from_changes_of_speed(trace, noise):
    times = ctrl.timing.BatchTime(np.array([1e-3, 2e-3, 2e-3]), np.array([0.1, 0.0, 0.0]), np.array([0.0, 0.0, 0.25]))
    _, fitted = recorded(trace, times, stages({0: 1.0, 90: (1, 3, 1)}, 3), noise)
    sizes = np.array([[60, 100, 160]] * 3).T
    found = fitted.cluster.times(sizes) * fitted.cluster.slowdown(20, 0.0)
    np.testing.assert_allclose(found, times(sizes), rtol=0.03 if noise is None else 0.12)
    then = fitted.cluster.slowdown(150, 0.0) / fitted.cluster.slowdown(20, 0.0)
    np.testing.assert_allclose(then, [1, 3, 1], rtol=0.03 if noise is None else 0.12)


def test_without_a_change_of_size_time_is_taken_to_be_proportional(trace):
    simulation = simulate(
        ctrl.Policy(lambda n: (), lambda o, s: (None, s)),
        Cluster(ctrl.timing.BatchTime(np.full(2, 0.01), 1.0)),
        [8, 4],
        40,
    )
    write(trace, simulation)
    fitted = fit(read_trace(trace))
    assert not fitted.certain.any()
    np.testing.assert_allclose(fitted.cluster.times((16, 8)), 2 * fitted.cluster.times((8, 4)))


def test_a_run_without_seconds_cannot_be_fitted(trace):
    simulation = simulate(ctrl.balance(), Cluster(ctrl.timing.BatchTime(np.ones(2))), 8, 3)
    write(trace, simulation, [("0/mine", 1)], lambda k, seconds: {"0/mine": [1.0]})
    with pytest.raises(RecordError, match=r"mon\.compute_seconds"):
        fit(read_trace(trace))
    trace.unlink()
    write(trace, simulation, leaves=lambda k, seconds: {"0/balance": [[seconds[0], None]]})
    with pytest.raises(RecordError, match="of worker 1"):
        fit(read_trace(trace))


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_last_of_several_runs_is_read_unless_another_is_named(trace):
    for steps in (3, 5):
        write(trace, simulate(ctrl.balance(), Cluster(ctrl.timing.BatchTime(np.ones(2))), 8, steps))
    assert len(read_trace(trace).steps) == 5
    assert len(read_trace(trace, 0).steps) == 3
    with pytest.raises(RecordError, match="holds 2 runs"):
        read_trace(trace, 2)


def test_a_run_that_was_killed_leaves_its_steps(trace):
    write(trace, simulate(ctrl.balance(), Cluster(ctrl.timing.BatchTime(np.ones(2))), 8, 3))
    trace.write_text(trace.read_text()[:-40])
    assert len(read_trace(trace).steps) == 2


@pytest.mark.parametrize("cut", [-40, -1, 30, 5])
def test_a_cut_line_costs_itself_and_no_other_run(trace, cut, caplog):
    """Cut in the last step, just before its end, in the header, and in its first word."""
    write(trace, simulate(ctrl.balance(), Cluster(ctrl.timing.BatchTime(np.ones(2))), 8, 3))
    whole = trace.read_text()
    trace.write_text(whole[:cut] + "\n" + whole.replace('"run_id":"0"', '"run_id":"1"'))
    with caplog.at_level("WARNING", "adaptive"):
        assert len(read_trace(trace).steps) == 3
        assert [record.message for record in caplog.records] == (
            [] if cut < 0 else [f"{trace}:1: this line is truncated. It is skipped."]
        )
        if cut < 0:
            assert len(read_trace(trace, 0).steps) == 2 + (cut == -1)


def test_limits_are_those_of_the_run(trace):
    write(trace, simulate(ctrl.balance(), Cluster(ctrl.timing.BatchTime(np.ones(2))), 8, 3))
    trace.write_text(trace.read_text().replace('"quantum":1', '"quantum":8,"multiple":4'))
    assert read_trace(trace).limits == ad.Limits((1, 1), (10**6, 10**6), 8, 4)


def test_a_trace_without_steps_is_refused(trace):
    trace.write_text('{"kind": "header", "version": 6, "run_id": "a"}\n')
    with pytest.raises(RecordError, match="no steps"):
        read_trace(trace)


def test_the_cost_of_a_microbatch_is_replayed(trace):
    """A split that gains less than its microbatches cost is not requested, in the run or in the replay."""

    def times(step, sizes):
        return 6e-4 * sizes * np.array([1.1, 1.0])

    write(trace, simulate(ctrl.schedule({0: 512}), times, [256, 256], 40, values=lambda step, seconds: ()))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    asked = []
    for call in (0.1, 40.0):
        trace.write_text("".join(json.dumps(line | {"call": call}, separators=(",", ":")) + "\n" for line in lines))
        asked.append(replay(ctrl.balance(), read_trace(trace), "0/balance", every=10))
    assert asked[0]
    assert not asked[1]
