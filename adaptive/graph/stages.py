"""Partitioning of a level's microbatch segment into stages, after each of which a message can be sent.

The backward pass computes the gradients of the last layers first. If they are sent in a separate message, it can travel
while the gradients of the first layers are computed. The segment becomes one program per message. Stage `s` has the
equations that its messages need and no earlier stage has; values that it reads from earlier stages are *crossing*.

The groups are chosen once, for the first size (`choose`), and used for all sizes, because they determine the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import prod
from operator import or_

import numpy as np
from jax.extend.core import DropVar, JaxprEqn, Var

from adaptive.base.jaxprs import has_effects, has_ordered_effects, nested
from adaptive.operators.replication_claims import assert_scope_p

from .flow import Origin, Scope
from .plan import Contribution, Message, Plan, Segment, Stage
from .trace import Atom, operands_of

Groups = Mapping[int, tuple[tuple[int, ...], ...]]
"""By level: for each stage, the indices of its contributions to the message that is always sent."""

LEAST_WORK = 0.02  # least share of a level's work in a stage; with less, a stage would hide no communication
# Cheap if fused into their consumer, and expensive to keep in memory.
_REPEATED = {"broadcast_in_dim", "iota", "transpose", "reshape", "squeeze", "expand_dims"}

_HEAVY = {"dot_general", "conv_general_dilated"}


# --- where to cut -----------------------------------------------------------------------------------------------------


def choose(plan: Plan, most: int) -> Groups:
    """Return groups of contributions with about equal bytes, in the order in which they are computed, for each level
    that can be cut.

    Args:
      plan: a plan without stages.
      most: the largest number of stages. There are fewer if the graph cannot be partitioned further.
    """
    found = {}
    for level, segment in plan.microbatches.items():
        message = always_sent(plan, level)
        if message is not None and not any(map(has_ordered_effects, segment.eqns)):
            groups = _Order(segment, message.contributions).groups(most)
            if len(groups) > 1:
                found[level] = groups
    return found


def always_sent(plan: Plan, level: int) -> Message | None:
    """Return the message of a level that is sent in every step and depends on the batch, or None."""
    sent = [plan.messages[number] for number in plan.sent_at(level)]
    usual = [m for m in sent if m.travels and m.gate is None and any(c.scope == Scope.MICROBATCH for c in m)]
    return usual[-1] if usual else None


class _Order:
    """The order in which contributions become known, by the work to compute them."""

    def __init__(self, segment: Segment, contributions: Sequence[Contribution]):
        self._contributions = contributions
        eqns = _one_by_one(segment.eqns)
        works = [work(eqn) for eqn in eqns]
        heavy = [n for n, w in enumerate(works) if w > 1e-4 * sum(works)]
        self._works = np.array([works[n] for n in heavy], float)
        bit = {n: 1 << i for i, n in enumerate(heavy)}
        self._needed: dict[Var, int] = {}  # the heavy equations that each value depends on; bit mask
        for n, eqn in enumerate(eqns):
            of_operands = (self._needed.get(a, 0) for a in operands_of(eqn) if isinstance(a, Var))
            bits = reduce(or_, of_operands, bit.get(n, 0))
            self._needed.update((v, bits) for v in eqn.outvars if not isinstance(v, DropVar))

    def _needs(self, c: Contribution) -> int:
        return reduce(or_, (self._needed.get(a, 0) for a in (c.value, c.weight) if isinstance(a, Var)), 0)

    def _work_of(self, bits: int) -> float:
        size = len(self._works)
        flags = np.frombuffer(bits.to_bytes(size // 8 + 1, "little"), np.uint8)
        return float(self._works @ np.unpackbits(flags, bitorder="little")[:size])

    def groups(self, most: int) -> tuple[tuple[int, ...], ...]:
        """Return the indices of contributions, as a group for each stage. The last has all without the batch."""
        of_microbatches = [i for i, c in enumerate(self._contributions) if c.scope == Scope.MICROBATCH]
        needs = {i: self._needs(self._contributions[i]) for i in of_microbatches}
        order = sorted(of_microbatches, key=lambda i: self._work_of(needs[i]))
        total = self._work_of(reduce(or_, needs.values(), 0))
        ends, bytes_until, bits = [0.0], [0], 0  # cumulative share of the work, cumulative bytes
        for i in order:
            bits |= needs[i]
            ends.append(self._work_of(bits) / total if total else 1.0)
            bytes_until.append(bytes_until[-1] + _nbytes(self._contributions[i]))
        cuts = [0]
        for nth in range(1, most):
            places = [
                n
                for n in range(cuts[-1] + 1, len(order))
                if (ends[n] - ends[cuts[-1]] > LEAST_WORK or (nth == 1 and 2 * bytes_until[n] >= bytes_until[-1]))
                and 1 - ends[n] > LEAST_WORK
                and ends[n + 1] > ends[n]
            ]
            if places:
                wanted = bytes_until[-1] * nth / most
                cuts.append(min(places, key=lambda n: abs(bytes_until[n] - wanted)))
        groups = [order[start:end] for start, end in zip(cuts, [*cuts[1:], len(order)], strict=True)]
        groups[-1] += [i for i in range(len(self._contributions)) if i not in needs]
        return tuple(tuple(sorted(group)) for group in groups)


def _nbytes(c: Contribution) -> int:
    return int(prod(c.value.aval.shape)) * c.value.aval.dtype.itemsize


def work(eqn: JaxprEqn) -> float:
    """Return the approximate number of operations of an equation."""
    inner = sum(work(e) for jaxpr in nested(eqn) for e in jaxpr.eqns)
    if inner:
        return inner * eqn.params.get("length", 1)
    out = sum(prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    if eqn.primitive.name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        return 2.0 * out * prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2.0 * out * prod(kernel) / kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return float(max(out, *(prod(getattr(a.aval, "shape", ())) for a in eqn.invars), 0))


# --- cutting ----------------------------------------------------------------------------------------------------------


def cut_in_stages(segment: Segment, messages: Mapping[int, Message]) -> tuple[Stage, ...]:
    """Return the stages of a segment.

    Args:
      messages: the messages that it computes, by number; each has its stage.
    """
    numbers: list[list[int]] = [[] for _ in range(1 + max(m.stage for m in messages.values()))]
    for number, message in messages.items():
        numbers[message.stage].append(number)
    sent = [[c for number in of_stage for c in messages[number]] for of_stage in numbers]
    return _Stages(segment, sent).cut(numbers)


class _Stages:
    def __init__(self, segment: Segment, sent: Sequence[Sequence[Contribution]]):
        self.segment, self.sent = segment, sent
        self.eqns = _one_by_one(segment.eqns)
        self.last = len(sent) - 1
        self.producer = {v: n for n, eqn in enumerate(self.eqns) for v in eqn.outvars if not isinstance(v, DropVar)}
        self.stage = [self.last] * len(self.eqns)  # of each equation
        self._assign()
        self._draw_forward()

    def _assign(self) -> None:
        """Assign to each stage the equations that its messages need, and the others to the last stage."""
        seen: set[int] = set()
        for number, contributions in enumerate(self.sent):
            stack = list(_atoms(contributions))
            while stack:
                n = self._made_by(stack.pop())
                if n is not None and n not in seen:
                    seen.add(n)
                    self.stage[n] = number
                    stack += operands_of(self.eqns[n])

    def _draw_forward(self) -> None:
        """Move equations on a sent value, such as the sum of its squares, to the stage of that value.

        Then the sum crosses to the next stage, and not the value.
        """
        drawn = {c.value for contributions in self.sent for c in contributions}
        for n, eqn in enumerate(self.eqns):
            operands = operands_of(eqn)
            if has_effects(eqn) or _is_heavy(eqn) or drawn.isdisjoint(_variables(operands)):
                continue
            self.stage[n] = min(self.stage[n], max(map(self._known_in, operands), default=self.last))
            drawn.update(eqn.outvars)

    def _made_by(self, atom: Atom) -> int | None:
        return self.producer.get(atom) if isinstance(atom, Var) else None

    def _known_in(self, atom: Atom) -> int:
        """Return the number of the stage in which a value is known."""
        n = self._made_by(atom)
        return 0 if n is None else self.stage[n]

    def cut(self, numbers: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
        members: list[list[int]] = []
        takes: list[list[Var]] = []
        for number, contributions in enumerate(self.sent):
            found, crossing = self._one(number, contributions)
            members.append(found)
            takes.append(crossing)
        kept: list[list[Atom]] = [[] for _ in self.sent]
        where: dict[Atom, tuple[int, int]] = {}

        def keep(atom: Atom, number: int) -> tuple[int, int]:
            kept[number].append(atom)
            return number, len(kept[number]) - 1

        outputs = []
        for atom in self.segment.outputs:
            n = self._made_by(atom)
            outputs.append(keep(atom, self.last if n is None else self.stage[n]))
            if n is not None:
                where[atom] = outputs[-1]
        for var in dict.fromkeys(v for crossing in takes for v in crossing):
            if var not in where:
                where[var] = keep(var, self._known_in(var))
        return tuple(
            Stage(
                self._part(members[number], takes[number], kept[number]),
                tuple(numbers[number]),
                tuple(where[var] for var in takes[number]),
                tuple(outputs),
            )
            for number in range(len(self.sent))
        )

    def _one(self, number: int, contributions: Sequence[Contribution]) -> tuple[list[int], list[Var]]:
        """Return a stage's equations, and its inputs from earlier stages."""
        found = {n for n, stage in enumerate(self.stage) if stage == number}
        stack = [*_atoms(contributions), *(a for n in found for a in operands_of(self.eqns[n]))]
        crossing: dict[Var, None] = {}
        seen = set()
        while stack:
            atom = stack.pop()
            n = self._made_by(atom)
            if n is None or n in found or atom in seen:
                continue
            seen.add(atom)
            if self.eqns[n].primitive.name in _REPEATED:
                found.add(n)
                stack += operands_of(self.eqns[n])
            else:
                crossing[atom] = None
        return sorted(found), sorted(crossing, key=self.producer.__getitem__)

    def _part(self, members: Iterable[int], crossing: Sequence[Var], kept: Sequence[Atom]) -> Segment:
        """Return a stage as a segment. All stages have the whole segment's inputs, followed by the crossing values."""
        inputs = *self.segment.inputs, *((var, Origin("crossing", i)) for i, var in enumerate(crossing))
        eqns = tuple(self.eqns[n] for n in members)
        return Segment(self.segment.kind, self.segment.level, eqns, inputs, tuple(kept))


def _one_by_one(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """Split assertions about several values into one for each, so that no value waits for the others."""
    found = []
    for eqn in eqns:
        if eqn.primitive is assert_scope_p:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            found += [eqn.replace(invars=[operand], outvars=[var]) for operand, var in pairs]
        else:
            found.append(eqn)
    return found


def _is_heavy(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _HEAVY or next(nested(eqn), None) is not None


def _atoms(contributions: Iterable[Contribution]) -> Iterable[Atom]:
    return (a for c in contributions for a in (c.value, c.weight) if isinstance(a, Var))


def _variables(atoms: Iterable[Atom]) -> Iterable[Var]:
    return (a for a in atoms if isinstance(a, Var))
