"""What a policy cannot read is refused when the program is built, with the driver's line and what to write instead."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.runtime.local_world import LocalWorld

DATA = {"x": np.ones((16, 2), np.float32)}


def building(policy, read):
    """A program of two workers whose hook is given what `read(grads, average)` returns."""

    def driver(w, batch):
        grads = jax.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(w)
        average = comm.all_reduce(grads)
        ctrl.hook(policy, *read(grads, average), every=5)
        return w - average, {}

    return ad.Program(driver, jnp.zeros(2), DATA, global_batch=8, world=LocalWorld(2), resizable=False)


def seconds():
    return comm.all_gather(mon.compute_seconds())


def iteration():
    return comm.all_reduce(mon.iteration_seconds(), op="max")


BY_SECONDS = [
    ctrl.balance,
    ctrl.published.lb_bsp,
    ctrl.published.leader_straggler,
    ctrl.published.proportional,
]
REFUSED = {
    **{
        f"{policy.__name__}, {what}": (policy(), read, says)
        for policy in BY_SECONDS
        for what, read, says in (
            ("one time", lambda g, a: (iteration(),), r"one time per worker, shape \(2,\); it received shape \(\)"),
            ("times of the step", lambda g, a: (comm.all_gather(mon.iteration_seconds()),), "those of the whole step"),
        )
    },
    "no time": (ctrl.balance(), lambda g, a: (), r"ctrl.hook\(ctrl.balance\(\), seconds\)"),
    "in milliseconds": (
        ctrl.balance(),
        lambda g, a: (1e3 * comm.all_gather(mon.iteration_seconds()),),
        "those of the whole step",
    ),
    "as many inputs": (ctrl.balance(), lambda g, a: (seconds(), seconds(), seconds()), "n_inputs=2"),
    "no link": (ctrl.balance(), lambda g, a: (seconds(), seconds()), "n_inputs=1"),
    "one input": (ctrl.balance(), lambda g, a: (seconds(), iteration()), r"shape \(2,\), after the times"),
    "gradients": (
        ctrl.noise_batch(),
        lambda g, a: (a,),
        r"an array of shape \(2,\)(?s:.*)mon.noise_scale",
    ),
    "a noise scale in a list": (
        ctrl.noise_batch(),
        lambda g, a: (mon.noise_scale(g, a).scale[None],),
        r"an array of shape \(1,\)",
    ),
    "no link of a slow worker": (ctrl.mitigate_slow_workers(), lambda g, a: (seconds(), seconds()), "n_inputs=1"),
    "no noise": (ctrl.noise_workers(64), lambda g, a: (), "it received nothing"),
    "goodput of times": (ctrl.goodput_batch(), lambda g, a: (iteration(), seconds(), a, a), "got 4 values of shapes"),
    "goodput of gradients": (ctrl.goodput_workers(), lambda g, a: (a, seconds(), iteration()), "reads a noise scale"),
    "one core": (
        ctrl.published.static_proportional(),
        lambda g, a: (comm.all_reduce(ctrl.published.cores()),),
        r"got shape \(\)(?s:.*)comm.all_gather\(ctrl.published.cores\(\)\)",
    ),
}


@pytest.mark.parametrize(("policy", "read", "says"), REFUSED.values(), ids=REFUSED)
def test_unreadable_values_are_refused_before_the_first_step(policy, read, says):
    with pytest.raises(ad.DriverError, match=says) as e, building(policy, read):
        pass
    assert re.match(rf"hook '{policy.name}' \(test_policy_values.py:\d+\): ", str(e.value))


ACCEPTED = {
    "seconds of one's own": (
        ctrl.balance(),
        lambda g, a: (comm.all_gather(1.0 * ad.worker_index().astype(float) + mon.iteration_seconds()),),
    ),
    "what the state knows": (ctrl.balance(), lambda g, a: (comm.all_gather(mon.iteration_seconds()) * a,)),
    "goodput": (ctrl.goodput_batch(), lambda g, a: (mon.noise_scale(g, a), seconds(), iteration())),
    "a noise scale": (ctrl.noise_batch(), lambda g, a: (mon.noise_scale(g, a),)),
    "nothing": (ctrl.published.static_proportional([1, 2]), lambda g, a: ()),
    "cores": (ctrl.published.static_proportional(), lambda g, a: (comm.all_gather(ctrl.published.cores()),)),
}


@pytest.mark.parametrize(("policy", "read"), ACCEPTED.values(), ids=ACCEPTED)
def test_readable_values_are_accepted(policy, read):
    with building(policy, read) as program:
        assert program.step().metrics == {}


def test_a_user_policys_check_gets_the_known_shapes():
    checked = []

    def check(values, n_workers, name):
        checked.append((values, n_workers, name))

    policy = ctrl.Policy(lambda n_workers: (), lambda observation, state: (None, state), "own", check=check)
    with building(policy, lambda g, a: (mon.noise_scale(g, a), seconds(), iteration())):
        pass
    (noise, of_all, one), n_workers, name = checked[0]
    assert (n_workers, name) == (2, "own")
    assert (noise.scale.shape, noise.scale.sources) == ((), frozenset())
    assert (of_all.shape, of_all.dtype, of_all.sources) == ((2,), np.float32, {"compute_seconds"})
    assert one.sources == {"iteration_seconds"}
