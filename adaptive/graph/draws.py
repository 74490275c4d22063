"""Notes on random numbers that every microbatch draws from one key, so that training depends on the split."""

from __future__ import annotations

from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.jaxprs import Var
from adaptive.operators.batch_key import is_of_batch

from .plan import Plan


def notes_on_draws(plan: Plan) -> list[str]:
    """Return a note on draws for the rows of a microbatch, if there are any. Draws in loops are left to `check`."""
    graph, rows = plan.graph, dict[str, None]()
    for eqn in graph.eqns:
        if eqn.primitive.name == "random_bits" and eqn.outvars[0] in plan.sized:
            key = eqn.invars[0]
            of_examples = isinstance(key, Var) and key in graph.from_batch
            if not of_examples and not key.aval.shape and not is_of_batch(key.aval.dtype):
                rows[at(line_of(eqn.source_info))] = None
    if not rows:
        return []
    return [
        f"random numbers are drawn for the rows of a microbatch from one key{''.join(rows)}, so those of an example "
        "depend on its index there, and all microbatches draw the same. Draw them by example: ad.batch_key() or "
        "ad.example_keys(), see docs/models.md."
    ]
