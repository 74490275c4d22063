"""Rule 2: replication is checked. A value that must be equal on all workers, and could differ, raises an error."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from adaptive.base.decision import Known
from adaptive.base.errors import CollectiveError, DriverError, ReplicationError
from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.arrays import is_key
from adaptive.base.values.jaxprs import JaxprEqn, Var
from adaptive.operators.collectives import collective_p, operands
from adaptive.operators.hooks import Hook, hook_p
from adaptive.operators.replication_claims import assert_scope_p

from .flow import Flow, Scope
from .trace import Atom, describe, operands_of


def check_replication(flow: Flow) -> None:
    """Check that hook values, state, metrics and operator states are replicated where they must be, and that claims
    hold.

    Raises:
      ReplicationError: a value that must be equal on all workers can differ.
      CollectiveError: an argument of an operator is replicated, but must be a worker's own.
      DriverError: a hook reads random keys.
    """
    for eqn in flow.graph.eqns:
        if eqn.primitive is assert_scope_p:
            _check_claim(flow, eqn)
        if eqn.primitive is hook_p:
            _check_hook(flow, eqn)
            _check_readable(flow, eqn)
        if eqn.primitive is collective_p and eqn.params["gated"]:
            _check_gate(flow, eqn)
    _check_state(flow)
    for label, atom in zip(flow.graph.metric_labels, flow.graph.metrics, strict=True):
        if flow.scope_of([atom]) > Scope.ALL:
            trail = Trail(flow, atom)
            raise ReplicationError(
                f"{label}{at(trail.made)} can differ between workers: it comes from {trail.cause}.\n"
                "A report has one value for all. "
                + (trail.advice or "Reduce it first:\n    comm.all_reduce(x)      comm.all_reduce(x, op='max')")
            )
    for eqn, _, new in flow.op_states:
        if flow.scope_of(new) == Scope.MICROBATCH:
            trail = Trail(flow, _narrowest(flow, new))
            raise ReplicationError(
                f"{describe(eqn)}{at(line_of(eqn.source_info))} averages over steps a value of one microbatch of "
                f"one worker: {trail.cause}. " + (trail.advice or "Reduce it first:  comm.all_reduce(...)")
            )


def _check_claim(flow: Flow, eqn: JaxprEqn) -> None:
    claimed, what, hint = (eqn.params[name] for name in ("scope", "what", "hint"))
    what, scope = f"{what}{at(line_of(eqn.source_info))}", flow.scope_of(eqn.invars)
    if claimed in ("local", "independent") and scope == Scope.ALL:
        raise CollectiveError(
            f"{what} needs this worker's own value, but its argument is equal on all workers: it is already averaged, "
            "or otherwise replicated. " + (hint or "Pass the value before its reduction.")
        )
    if claimed == "independent" and (coupling := _coupling(flow, eqn.invars)) is not None:
        raise CollectiveError(
            f"{what} needs gradients that are independent between workers. These are coupled: their backward pass goes "
            f"through {describe(coupling)}{at(line_of(coupling.source_info))}, a mean over all workers, as in "
            'batch normalization with axis_name="workers". So their differences are not sampling noise. Leave it out, '
            "or use a normalization of single examples, such as group or layer norm: see docs/models.md"
        )
    if claimed in ("reduced", "before") and scope != Scope.ALL:
        raise CollectiveError(
            f"{what} needs a value that is equal on all workers, but its argument can differ between them: it comes "
            f"from {Trail(flow, _narrowest(flow, eqn.invars)).cause}. {hint or 'Reduce it first:  comm.all_reduce(x)'}"
        )
    if claimed == "before" and flow.level_of(eqn.invars):
        raise CollectiveError(
            f"{what} needs a value that is known before the step, but its argument depends on a reduction of the same "
            f"step. {hint or 'Take it from the state that the driver receives.'}"
        )
    if claimed == "replicated" and scope == Scope.MICROBATCH:
        cause = Trail(flow, _narrowest(flow, eqn.invars)).cause
        raise ReplicationError(
            f"{what} has a value that comes from {cause}. It differs between microbatches. "
            "Reduce it:  comm.all_reduce(x)"
        )


def _coupling(flow: Flow, atoms: Sequence[Atom]) -> JaxprEqn | None:
    """Return a collective of a backward pass that values are computed from without another collective between."""
    producer = flow.graph.producer
    reached = flow.graph.upstream(atoms, lambda var: var in producer and producer[var].primitive is collective_p)
    return next((producer[var] for var in reached if var in flow.graph.backward and var in producer), None)


def _check_gate(flow: Flow, eqn: JaxprEqn) -> None:
    """Check that `when=` is known before the step runs, and is the same on all workers (rule 1)."""
    when = operands(eqn.invars, eqn.params).when
    where = f"{eqn.params['how'].name}(when=){at(line_of(eqn.source_info))}"
    if flow.scope_of([when]) > Scope.ALL:
        trail = Trail(flow, when)
        raise ReplicationError(
            f"{where} can differ between workers: it comes from {trail.cause}. One worker would send while another "
            "does not. " + (trail.advice or "Let a control hook decide:\n" + _HOOK_DECIDES)
        )
    if flow.level_of([when]):
        raise CollectiveError(
            f"{where} depends on messages of the same step; whether a step communicates must be known before it "
            "starts. Let a control hook decide, for the next step:\n" + _HOOK_DECIDES
        )


_HOOK_DECIDES = """    averaging = ad.hyperparameter("averaging", True)   # a hook sets it
    x = comm.all_reduce(x, when=averaging)                 # or  when=ad.step_number() % 8 == 0"""


def _check_state(flow: Flow) -> None:
    graph = flow.graph
    narrow = [
        i for i, new in enumerate(graph.new_state) if i not in flow.local_state and flow.scope_of([new]) > Scope.ALL
    ]
    if not narrow:
        return
    more = f" and {len(narrow) - 3} more" if len(narrow) > 3 else ""
    names = ", ".join(graph.state_names[i] for i in narrow[:3]) + more
    first = graph.new_state[narrow[0]]
    trail = Trail(flow, first)
    raise ReplicationError(
        f"the new state can differ between workers: {names}{at(trail.made)} comes from {trail.cause}, and no "
        "collective stands between.\nEach worker would train a model of its own. "
        + (trail.advice or _advice(flow, graph.state_names[narrow[0]], first))
    )


def _advice(flow: Flow, name: str, new: Atom) -> str:
    """Return advice for a leaf of the state: reduce the gradients, or this leaf if others depend on reduced values."""
    graph = flow.graph
    local = {v for v in graph.upstream([new], lambda v: flow.scope_of([v]) == Scope.ALL) if flow.scope_of([v])}
    if any(graph.producer[v].primitive is collective_p for v in local if v in graph.producer):
        return (
            f"If that is meant, as in model averaging, say which part of the state belongs to each worker:\n"
            f"    ad.Program(..., per_worker_state=lambda state: {name})        or strategy.per_worker_state\n"
            "Otherwise average over all workers:\n"
            "    grads = comm.all_reduce(grads)"
        )
    if not any(flow.level_of([leaf]) for leaf in graph.new_state):
        return "Reduce the gradients first:\n    grads = comm.all_reduce(grads)"
    return f"""The gradients may be reduced, but {name} is computed from values of one worker. If it is
  a running average of batch normalization, compute its statistics over all examples of the step:
    BatchNorm(..., axis_name="workers")        see docs/models.md
    eqx.nn.BatchNorm(..., axis_name=("batch", "workers"))        see docs/port.md
  a loss scale, change it by the reduced gradients:
    dynamic_scale.value_and_grad(loss_fn, axis_name="workers")        see docs/models.md
  the state of a rule that reads the loss, such as value= of optax.contrib.reduce_on_plateau, reduce that before:
    loss, grads = comm.all_reduce((loss, grads))
  each worker's own, as the state of an environment, or of a recurrent net between batches:
    ad.Program(..., per_worker_state=lambda state: {name})
Otherwise reduce it:
    new = comm.all_reduce(new)        for integers op="max", "min" or "sum", instead"""


def _check_hook(flow: Flow, eqn: JaxprEqn) -> None:
    hook: Hook = eqn.params["hook"]
    for name, atom in zip(hook.leaf_names, eqn.invars, strict=True):
        if is_key(atom.aval):
            where = f"hook {hook.name!r}{at(line_of(eqn.source_info))}"
            raise DriverError(f"{where} reads random keys, {name}; it can read numbers:  jax.random.key_data({name})")
        if flow.scope_of([atom]) == Scope.ALL:
            continue
        trail = Trail(flow, atom)
        raise ReplicationError(
            f"hook {hook.name!r}{at(line_of(eqn.source_info))} reads a value that can differ between "
            f"workers: its {name}, which comes from {trail.cause}.\n"
            "One worker could then rescale while another does not. "
            + (
                trail.advice
                or "Reduce it first:\n"
                "    comm.all_reduce(x)      one value for all      or      comm.all_gather(x)      one row per worker"
            )
        )


def _check_readable(flow: Flow, eqn: JaxprEqn) -> None:
    """Let a hook's handler check that it can read the hook's values."""
    hook: Hook = eqn.params["hook"]
    if hasattr(hook.handler, "check"):
        known = [Known(tuple(a.aval.shape), np.dtype(a.aval.dtype), _measured(flow, a)) for a in eqn.invars]
        hook.handler.check(jax.tree.unflatten(hook.tree, known), flow.graph.capacity)


def _measured(flow: Flow, atom: Atom) -> frozenset[str]:
    """Return the sources that a value is computed from; empty if it also depends on other inputs."""
    reached = flow.graph.upstream([atom], flow.origin.__contains__)
    origins = [flow.origin[var] for var in reached if var in flow.origin]
    if any(origin.kind not in ("source", "const") for origin in origins):
        return frozenset()
    return frozenset(str(origin.index) for origin in origins if origin.kind == "source")


def _narrowest(flow: Flow, atoms: Sequence[Atom]) -> Atom:
    return max(atoms, key=lambda a: flow.scope_of([a]))


_ORIGINS = {
    "batch": "this worker's examples",
    "op_state": "a moving average of local values",
    "state": "state marked as local",
}


class Trail:
    """The origin of a local value: its line, and the input that makes it local.

    Attributes:
      made: the line of the driver that computes the value.
      cause: "this worker's examples (driver.py:14)".
      advice: what to write instead, if that is the same for all uses of the value; else "".
    """

    def __init__(self, flow: Flow, atom: Atom):
        self.made = self.advice = line = ""
        self.cause = "a local value"
        while isinstance(atom, Var):
            number = flow.producer.get(atom, -1)
            before = line_of(flow.graph.eqns[number].source_info) if number >= 0 else ""
            self.made, line = self.made or before, before or line
            operands = operands_of(flow.graph.eqns[number]) if number >= 0 else ()
            found = self._cause(flow, atom, number, flow.scope_of(operands))
            if found:
                self.cause, self.advice = found
                break
            # Prefer the batch's values to numbers of its shape, as in the gradient of a mean.
            atom = max(operands, key=lambda a: (flow.scope_of([a]), isinstance(a, Var) and a in flow.graph.from_batch))
        self.cause += at(line)

    @staticmethod
    def _cause(flow: Flow, var: Var, number: int, before: Scope) -> tuple[str, str] | None:
        """Return why a value's scope is narrower than `before`, that of its operands, and advice; None if it is not."""
        origin = flow.origin.get(var)
        if var in flow.sized and before < Scope.MICROBATCH and (origin is None or origin.kind == "const"):
            return "a number of the batch's shape, the size of one microbatch", _NUMBERS
        if origin is not None:
            return _ORIGINS.get(origin.kind, f"{origin.index!r}, which each worker measures for itself"), ""
        if number in flow.communicates:
            how = flow.graph.eqns[number].params["how"]
            return f"{how.name}, whose result differs between workers", ""
        if number in flow.at_home and before < Scope.WORKER:
            return (
                f"the host ({flow.graph.eqns[number].primitive.name}), whose result may differ between workers",
                _HOST,
            )
        return None


_NUMBERS = """Use instead:
    ad.global_batch()      all examples of the step
    ad.batch_size()        this worker's
or count by  comm.all_reduce(len(x), op="sum")"""

_HOST = """Broadcast one worker's value, or assert that it is the same on all:
    x = comm.broadcast(x)
    x = ad.replicated(x)"""
