"""The summary line of what a run adapted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.observe.adapted import Adapted
from adaptive.observe.events import HookValues
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import event, make_data

HOOKS = [HookValues("0/adapt", 1, (), []), HookValues("1/balance", 1, (), [])]


def line(*events, compiling=False):
    adapted = Adapted()
    for each in events:
        adapted.take(each)
    return adapted.line(compiling=compiling)


def after(step, sizes, *decided, **report):
    return replace(event(step, sizes=sizes, hooks=HOOKS, **report), decided=decided)


def test_sizes_splits_and_causes():
    run = [
        after(1, (32, 32), "adapt"),
        after(2, (60, 60), "balance"),
        after(3, (80, 40), "adapt", "balance"),
        after(4, (800, 400)),
    ]
    assert line(*run) == (
        "adapted: global batch 64 → 1,200 in 2 changes; split in 1 change; asked for by adapt (2), balance (2)"
    )


def test_workers_and_hyperparameters():
    lr = np.float32(0.1)
    run = [
        after(1, (8, 8, 0), members=(0, 1), hyperparameters={"lr": lr}),
        after(2, (6, 5, 5), hyperparameters={"lr": lr}),
        after(3, (6, 5, 5), hyperparameters={"lr": lr / 2}),
    ]
    assert line(*run) == "adapted: workers 2 → 3 in 1 change; lr 0.1 → 0.05 in 1 change"


def test_a_hyperparameter_changes_if_its_value_differs_from_the_step_before():
    values = [{"n": 1, "scales": [1, 2]}, {"n": 2, "scales": [1, 2], "new": 3}, {"n": 2, "scales": [1, 3], "new": 3}]
    run = [after(step, (4, 4), "adapt", hyperparameters=known) for step, known in enumerate(values, 1)]
    assert line(*run) == ("adapted: n 1 → 2 in 1 change; scales [1, 2] → [1, 3] in 1 change; asked for by adapt (3)")


def test_workers_that_join_with_a_larger_batch_are_two_changes():
    run = [after(1, (8, 8, 0), members=(0, 1)), after(2, (8, 8, 8)), after(3, (8, 8, 0), members=(0, 1))]
    assert line(*run) == "adapted: global batch 16 → 16 in 2 changes; workers 2 → 2 in 2 changes"


def test_a_run_in_which_nothing_changed_says_so():
    assert line(after(1, (4, 4)), after(2, (4, 4))) == "adapted: nothing; adapt, balance asked for no change"
    silent = replace(after(2, (4, 4)), hooks=(replace(HOOKS[1], why="workers are equally fast"),))
    assert line(after(1, (4, 4)), silent) == "adapted: nothing; balance (workers are equally fast) asked for no change"
    assert "in 1 change" in line(after(1, (4, 4)), after(2, (600, 600)), after(3, (600, 600)))
    asked = line(after(1, (4, 4), "adapt"), after(2, (4, 4)))
    assert asked == "adapted: nothing, though asked for by adapt (1)"


def test_nothing_may_have_changed_because_kernels_are_being_compiled():
    asked = line(after(1, (4, 4), "adapt"), after(2, (4, 4)), compiling=True)
    assert asked.endswith("asked for by adapt (1); kernels of other sizes are still being compiled")
    assert "compiled" not in line(after(1, (4, 4), "adapt"), after(2, (6, 6)), compiling=True)
    assert "compiled" not in line(after(1, (4, 4)), after(2, (4, 4)), compiling=True)


def test_without_hooks_there_is_nothing_to_say():
    assert line() == ""
    assert line(event(1), event(2)) == ""


def test_a_run_with_progress_ends_with_it(capsys):
    def grow(control, noise):
        control.rescale(global_batch=4 * control.step)

    def driver(state, batch):
        loss = comm.all_reduce(batch["y"].mean())
        ctrl.hook(grow, loss, every=2)
        return state + loss, {"loss": loss}

    with ad.Program(driver, 0.0, make_data(24), global_batch=4, world=LocalWorld(2)) as program:
        program.warm_up()
        for _ in program.run(steps=5, progress=True):
            program.warm_up()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "adapted: global batch 4 → 16 in 2 changes; asked for by grow (2)"
    )
