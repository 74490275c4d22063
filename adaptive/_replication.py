"""Rule 2: replication is checked, not hoped for. What could differ between workers, and must not, is refused."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import JaxprEqn, Var

from ._errors import ReplicationError
from ._flow import Flow, Scope
from ._trace import Atom, describe
from ._where import at, line_of
from .operators import Hook, hook_p


def check_replication(flow: Flow) -> None:
    """Raise a `ReplicationError` for a hook, state, metric or slot that is narrower than it has to be."""
    graph = flow.graph
    for eqn in graph.eqns:
        if eqn.primitive is hook_p:
            _check_hook(flow, eqn)
    wrong = [
        i for i, new in enumerate(graph.new_state) if i not in flow.local_state and flow.scope_of([new]) > Scope.ALL
    ]
    if wrong:
        names = ", ".join(graph.state_names[i] for i in wrong[:3]) + (
            f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        )
        made, local = _trail(flow, graph.new_state[wrong[0]])
        raise ReplicationError(
            f"the new state can differ between workers: {names}{at(made)} comes from {local}, and no collective "
            "stands between.\nEach worker would train a model of its own. Reduce the gradients first:\n"
            "    grads = comm.all_reduce(grads)"
        )
    for name, atom in zip(graph.metric_names, graph.metrics, strict=True):
        if flow.scope_of([atom]) > Scope.ALL:
            _, local = _trail(flow, atom)
            raise ReplicationError(
                f"metric {name} can differ between workers: it comes from {local}.\n"
                f"A report has one value for all. Reduce it first:\n    comm.all_reduce(...)"
            )
    for eqn, _, new in flow.slots:
        if flow.scope_of(new) == Scope.CALL:
            raise ReplicationError(
                f"{describe(eqn)}{at(line_of(eqn.source_info))} averages over steps what belongs to one kernel call of "
                f"one worker: {_trail(flow, _narrowest(flow, new))[1]}. Reduce it first:  comm.all_reduce(...)"
            )


def _check_hook(flow: Flow, eqn: JaxprEqn) -> None:
    hook: Hook = eqn.params["hook"]
    for position, atom in enumerate(eqn.invars):
        if flow.scope_of([atom]) == Scope.ALL:
            continue
        path = _leaf_path(hook, position)
        _, local = _trail(flow, atom)
        raise ReplicationError(
            f"hook {hook.name!r}{at(line_of(eqn.source_info))} reads a value that can differ between "
            f"workers: its {path}, which comes from {local}.\n"
            "One worker could then rescale while another does not. Reduce it first:\n"
            f"    comm.all_reduce(x)      one value for all      or      comm.all_gather(x)      one row per worker"
        )


def _leaf_path(hook: Hook, position: int) -> str:
    """ "2nd value, leaf .scale" for a leaf of a hook's values."""
    tree = jax.tree.unflatten(hook.tree, range(hook.tree.num_leaves))
    path = jax.tree_util.tree_leaves_with_path(tree)[position][0]
    nth = {0: "1st", 1: "2nd", 2: "3rd"}.get(path[0].idx, f"{path[0].idx + 1}th")
    rest = jax.tree_util.keystr(path[1:])
    return f"{nth} value" + (f" ({rest})" if rest else "")


def _narrowest(flow: Flow, atoms: Sequence[Atom]) -> Atom:
    return max(atoms, key=lambda a: flow.scope_of([a]))


def _trail(flow: Flow, atom: Atom) -> tuple[str, str]:
    """Where a local value was made, and what made it local: the driver's line, "this worker's examples
    (driver.py:14)".
    """
    made, last_line = "", ""
    while isinstance(atom, Var):
        origin = flow.origin.get(atom)
        if origin is not None:
            what = {
                "batch": "this worker's examples",
                "source": f"{origin.index!r}, which each worker measures for itself",
                "slot": "a moving average of local values",
                "state": "state marked as local",
            }[origin.kind]
            return made, what + at(last_line)
        eqn = flow.graph.eqns[flow.producer[atom]]
        line = line_of(eqn.source_info)
        made, last_line = made or line, line or last_line
        atom = _narrowest(flow, flow.operands(flow.producer[atom]))
    return made, "a local value" + at(last_line)
