"""Notes on random numbers that every microbatch draws from one key, so that training depends on the split."""

from __future__ import annotations

from collections.abc import Sequence, Set

from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.jaxprs import Var
from adaptive.operators.batch_key import is_of_batch
from adaptive.operators.collectives import collective_p

from .plan import Plan
from .trace import Atom


def notes_on_draws(plan: Plan) -> list[str]:
    """Return notes on draws for the rows of a microbatch, and on draws that are added to its sums.

    Draws in loops are left to `check`.
    """
    graph, rows, sums = plan.graph, dict[str, None](), dict[str, None]()
    of_batch = graph.from_batch
    drawn: set[Var] = set()  # random numbers that are the same in all microbatches

    def of(atoms: Sequence[Atom], found: Set[Var]) -> bool:
        return any(isinstance(a, Var) and a in found for a in atoms)

    for eqn in graph.eqns:
        line = at(line_of(eqn.source_info))
        if eqn.primitive is collective_p:
            continue
        if eqn.primitive.name == "random_bits" and not of(eqn.invars, of_batch):
            key, bits = eqn.invars[0].aval, eqn.outvars[0]
            if bits not in plan.sized:
                drawn.add(bits)
            elif not key.shape and not is_of_batch(key.dtype):
                rows[line] = None
        elif of(eqn.invars, of_batch):
            shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
            of_examples = any(size % graph.examples == 0 for size in shape)
            if eqn.primitive.name in ("add", "sub", "add_any") and of(eqn.invars, drawn) and not of_examples:
                sums[line] = None
        elif of(eqn.invars, drawn):
            drawn.update(eqn.outvars)
    notes = []
    if rows:
        notes.append(
            f"random numbers are drawn for the rows of a microbatch from one key{''.join(rows)}, so those of an "
            "example depend on its index there, and all microbatches draw the same. Draw them by example: "
            "ad.batch_key() or ad.example_keys(), see docs/models.md."
        )
    if sums:
        notes.append(
            f"random numbers are added to a sum or mean of each microbatch{''.join(sums)}. All microbatches add the "
            "same, so their effect does not become smaller with more of them. Add them to the reduced value, after "
            "comm.all_reduce(...)."
        )
    return notes
