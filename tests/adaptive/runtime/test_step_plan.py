"""Data that all steps share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from adaptive.runtime.message import lay_out_all
from adaptive.runtime.step_plan import bytes_per_execution, part_slices
from tests.adaptive.drivers import planned

STATE = {"kept": jnp.zeros(2), "new": jnp.zeros(3), "read": jnp.zeros(4), "unread": jnp.zeros(5), "w": jnp.zeros(())}


def test_parts_follow_one_another_within_a_level():
    def several(state, batch):
        mean = batch["y"].mean()
        own = state["w"] + comm.all_reduce(mean, when=ad.step_number() % 2 == 0)
        usual = comm.all_reduce(batch["x"].sum(), op="sum") + comm.all_reduce(mean, op="max")
        later = comm.all_reduce((usual * batch["y"]).max(), op="max")
        return {**state, "w": own, "new": jnp.full(3, usual), "kept": jnp.full(2, later)}, {}

    plan = planned(several, STATE, local_state=[4])
    layouts = lay_out_all(plan.messages, capacity=2, status=0)
    assert [m.level for m in plan.messages] == [0, 0, 1]
    counts = [len(layout.parts) for layout in layouts]
    places = part_slices(plan, layouts)
    assert [(p.start, p.stop) for p in places] == [(0, counts[0]), (counts[0], counts[0] + counts[1]), (0, counts[2])]
    nbytes = [sum(4 * int(np.prod(p.shape)) for p in layout.parts) for layout in layouts]
    assert bytes_per_execution(plan, layouts) == nbytes[0] + nbytes[1] > nbytes[2]
