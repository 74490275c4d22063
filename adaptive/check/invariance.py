"""Checks that a step's result does not depend on the batch's split, as it does with batch norm or summed losses.

Steps are run on one batch in equal shares, and again in random uneven ones of several calls: a few steps in a row, and,
where the driver reads the step's number, others. Every trial of a step starts from the same state, so that rounding
does not grow from step to step. All is computed in double precision where that can be done.

What is compared first is what messages bring, where rounding is well understood, and only then the state, metrics and
hook values: an optimizer such as Adam magnifies rounding where gradients are near zero, so a difference there counts
only if something that was brought differs on the way to it. And it is compared element by element, as many optimizers
work: to Adam an element of 1 beside one of 1e7 is no smaller. What counts as rounding is found for each leaf from its
own arithmetic: inputs are moved by their last place, and what then moves by as much does not count.

Some operators look at the split on purpose. Metrics and hook values may differ (the state may not) where all that
differs on the way to them is

    made of no examples            all_gather(compute_seconds()), ad.batch_size()
    gathered, and shown as it is   all_gather(loss), a row for each worker
    a statistic over calls         the noise scale, which counts them: it reads how many calls and examples there are

A number of the batch's shape, such as len(batch), is none of these: it is the size of one microbatch.

A decision (a comparison, an argmax) can hide a difference: it comes out the same until it does not. Where something
differs and all that follows it are decisions that came out the same, the answer is "not known".

Where what is sent, or stays, is each worker's own on purpose, a step depends on its split by what it is, and nothing is
compared: what workers average for themselves, or with some others, or reduce in some steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import BatchSizeError
from adaptive.base.reductions import Mixed
from adaptive.base.source_lines import at
from adaptive.graph.plan import Contribution, Plan
from adaptive.operators.batch_key import drawn_for_a_microbatch
from adaptive.operators.sources import MICROBATCHES, STEP
from adaptive.runtime.engine import Engine

from .influence import Influence, Place, steps_named
from .trials import Bench, Output, Result, Split, Start, even_split, fine_split, outputs_of, uneven_splits
from .widen import SINGLE, CannotWidenError, Width, widened, widths_for

_SPLITS = 3
_STEPS_IN_A_ROW = 3
_LATER_STEPS = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
_MOST_NAMED = 8
_ROUNDING = 100  # units in the last place that a sum over a batch may be off by
_MULTIPLE = 16  # of what moving inputs by their last place does
_NUDGES = 2
_NOISY = 0.03  # a value that rounding moves by this part of it cannot be compared
_NEGLIGIBLE = 1e-4  # unless it is so small beside what else is reduced that it is zero but for rounding
_OF_ELEMENT = 100  # of what that does to a single element, of which a leaf may have many
_OF_LARGEST = 4  # units in the last place of a leaf's largest element, below which no element is compared
_SINGLE_EPS = float(np.finfo(SINGLE).eps)


@dataclass(frozen=True)
class Invariance:
    """What `Program.check` found: "yes", "no" or "not known". True for "yes" alone, so that it can be asserted.

    Attributes:
      differences: state leaves that come out differently, by name, with the largest difference found, relative to the
        step's change of that leaf; operator states that the state is computed from too.
      reports: metrics and hook values that do, relative to their value.
      reductions: where they come from: "grads['kernel'] (driver.py:15)", with the largest difference relative to
        the value.
      hidden: reductions that differ, and that the state, a metric or a hook value follows, though it came out the same
        in the steps tried: for a learning rate of zero, say.
      splits: what was tried: per split, each worker's calls.
      steps: the numbers of the steps that were tried.
      note: why it is not known, if it is not.
      drawn: lines of the driver where one key draws random numbers for all examples of a microbatch.
      on_purpose: what in the driver is each worker's own by what it is, so that nothing had to be compared.
    """

    differences: dict[str, float]
    reductions: dict[str, float]
    splits: tuple[Split, ...]
    reports: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    note: str = ""
    drawn: tuple[str, ...] = ()
    on_purpose: str = ""

    @property
    def verdict(self) -> str:
        """ "yes", "no", or "not known": nothing could be compared, or not all of it. `note` says why."""
        if self.differences or self.reports or self.hidden or self.on_purpose:
            return "no"
        return "not known" if self.note else "yes"

    def __bool__(self) -> bool:
        return self.verdict == "yes"

    def __str__(self) -> str:
        if self.verdict == "not known":
            return f"not known whether the step is split-invariant: {self.note}"
        if self.on_purpose:
            return (
                f"not split-invariant, on purpose: {self.on_purpose}.\n"
                "The step uses local values that differ between workers, so it depends on how its batch is split.\n"
                "Nothing was compared. To check the model itself, use synchronous SGD:\n"
                "    strategy = sync.synchronous(optimizer)"
            )
        tried = f"{len(self.splits)} random splits of {sum(map(sum, self.splits[0]))} examples"
        steps = f"{len(self.steps)} steps" if len(self.steps) > 1 else "one step"
        if self:
            return f"split-invariant: {tried} gave the same as equal shares, in {steps}."
        lines = [f"not split-invariant: with {tried}, in {steps},"]
        lines += _listed("these leaves of the state come out differently:", self.differences, "its change")
        lines += _listed("these metrics and hook values come out differently:", self.reports, "its value")
        lines += _listed("through these reductions:", self.reductions, "its value")
        same = "these reductions do, and what follows them does not show it in these steps (a learning rate of zero?):"
        lines += _listed(same, self.hidden, "its value")
        if self.drawn:
            lines += [
                f"Random numbers are drawn for a whole microbatch from one key ({', '.join(self.drawn)}),",
                "so those of an example depend on its index in the call. Draw them by example:",
                '    rngs={"dropout": ad.batch_key()}        see docs/dropout.md',
            ]
        lines += [
            'Usual causes: batch normalisation without axis_name="workers", a loss that is summed and not averaged',
            "over examples, losses that couple examples of a batch, a mean of means, several steps on a local batch,",
            "what wire= rounds away. See docs/sharp_bits.md.",
        ]
        return "\n".join(lines)


def _listed(title: str, found: dict[str, float], of: str) -> list[str]:
    return [title, *(f"  {name}   by {value:.2g} of {of}" for name, value in found.items())] if found else []


def check_invariance(
    engine: Engine,
    batch: Any,
    *,
    seed: int,
    tolerance: float | None,
    step: int = 0,
    program_seed: int = 0,
) -> Invariance:
    """Compare steps of one batch under different splits. Changes nothing in `engine`.

    Args:
      seed: of the splits.
      tolerance: relative to the norm of a reduced value; by default 100 units in the last place of each element.
      step: number of steps before.
      program_seed: the program's seed, for `step_key`.

    Raises:
      BatchSizeError: the batch cannot be split over the workers.
    """
    examples, n, plan = len(jax.tree.leaves(batch)[0]), engine.world.capacity, engine.plan
    on_purpose = _each_workers_own(plan)
    if on_purpose:
        return Invariance({}, {}, (), on_purpose=on_purpose)
    if examples % plan.multiple:
        raise BatchSizeError(
            f"check: {examples} examples are no multiple of {plan.multiple}, as the driver's minibatches need."
        )
    for pairing in plan.graph.pairings:
        return Invariance({}, {}, (), note=f"the result of {pairing.line} depends on which values are published when.")
    if not plan.splittable and n == 1:
        return Invariance({}, {}, (), note=f"nothing to compare on one worker: {plan.unsplittable[0]}.")
    few = Invariance({}, {}, (), note=f"nothing to compare: a batch of {examples} cannot be split in another way.")
    if examples // plan.multiple < max(2, n):
        return few
    least, most, rng = engine.min_microbatches, engine.kernels.largest_microbatch, np.random.default_rng(seed)
    even = even_split(examples, n, plan, least=least, most=most)
    splits = uneven_splits(rng, _SPLITS, even, plan, least=least, most=most)
    if not splits:
        return few
    fine = fine_split(examples, n, plan, most=most)

    def compared(width: Width | None) -> Invariance:
        with width.settings() if width else nullcontext():
            plans = widened(engine.plans, width) if width else engine.plans
            bench = Bench(plans, engine, batch, seed=program_seed, width=width)
            try:
                return _Comparison(bench, plan, even, splits, fine, rng, tolerance).of_steps(step)
            finally:
                bench.close()

    *better, own = widths_for(plan, engine.world.devices[0])
    for width in better:
        with suppress(CannotWidenError, jax.errors.JaxRuntimeError):  # there may not be the memory for it
            return compared(width)
    return compared(own)


def _each_workers_own(plan: Plan) -> str:
    """Return a description of the collectives by which replicas differ on purpose; "" if there are none."""
    for c in (c for message in plan.messages for c in message):
        what = f"{c.how.about}{at(c.line)}"
        if c.when is not None:
            return f"{what} is sent in some steps only, and leaves each worker's own in the others"
        if isinstance(c.how.op, Mixed):
            return f"{what} averages with some other workers only"
        if not c.how.travels:
            return f"each worker's examples are averaged by themselves{at(c.line)}"
    return ""


@dataclass
class _Difference:
    """A contribution that differed, in the step where it first did, with the data for a closer look."""

    value: float  # relative to the contribution's
    start: Start
    step: int
    even: Result
    other: Result


class _Comparison:
    """The trials of one driver and their comparison so far."""

    def __init__(
        self,
        bench: Bench,
        driver: Plan,
        even: Split,
        splits: tuple[Split, ...],
        fine: Split,
        rng: np.random.Generator,
        tolerance: float | None,
    ):
        self.bench, self.even, self.splits, self.fine = bench, even, splits, fine
        self.rng, self.tolerance = rng, tolerance
        self.plan, self.influence, self.outputs = bench.plan, Influence(bench.plan), bench.outputs
        self.precisions = _Precisions(self.plan, self.influence, self.outputs, driver)
        self.states: dict[str, float] = {}
        self.reports: dict[str, float] = {}
        self.reductions: dict[str, float] = {}
        self.differing: dict[Place, _Difference] = {}
        self.noisy: dict[str, float] = {}
        self.not_finite: dict[str, None] = {}
        self.floors = _Floors({}, {})

    def of_steps(self, first: int) -> Invariance:
        start, tried = self.bench.start, []
        for step in range(first, first + _STEPS_IN_A_ROW):
            # As many splits in the first step as there are, then one by one.
            splits = self.splits if step == first else [self.splits[step % len(self.splits)]]
            tried.append(step)
            start = self._of_step(start, step, splits)
            if self.states:
                break
        for step in [] if self.states or self.reports else self._later_steps(tried):
            tried.append(step)
            self._of_step(start, step, [self.splits[len(tried) % len(self.splits)]])
        if self._undecided():  # a maximum, say, is least like that of the whole in the smallest calls
            self._of_step(self.bench.start, first, [self.fine])
        hidden = {} if self.states else {self._name(p): self.differing[p].value for p in self._hidden()}
        return Invariance(
            self.states, self.reductions, self.splits, self.reports, hidden, tuple(tried), self._note(), self._drawn()
        )

    def _drawn(self) -> tuple[str, ...]:
        graph = self.plan.graph
        return tuple(drawn_for_a_microbatch(graph.eqns, graph.examples))

    def _later_steps(self, tried: Sequence[int]) -> list[int]:
        if not any(s.name == STEP.name for s in self.plan.sources):
            return []
        named = [n + d for n in steps_named(self.plan, STEP.name)[:_MOST_NAMED] for d in (-1, 0, 1)]
        return [s for s in dict.fromkeys([*_LATER_STEPS, *named]) if s not in tried]

    def _note(self) -> str:
        if self.not_finite:
            return f"{_some(self.not_finite)} is not finite on this batch, so there is nothing to compare."
        if self.noisy:
            by = max(self.noisy.values())
            return f"rounding alone moves {_some(self.noisy)} by {by:.2g} of its value, which hides any difference."
        if undecided := self._undecided():
            return (
                f"{_some(undecided)} depends on the split, but is only used in comparisons or an argmax. These gave "
                "the same in all trials; they may not for another batch or a later state."
            )
        if not any(self._facts(p).of_data for p in self._relevant):
            return "nothing to compare: the state, metrics and hook values are computed from no examples."
        return ""

    # --- one step -----------------------------------------------------------------------------------------------------

    def _of_step(self, start: Start, step: int, splits: Sequence[Split]) -> Start:
        """Compare one step; returns what the next one starts from."""
        whole = self.bench.run(start, self.even, step)
        self._look_for_what_is_not_finite(whole)
        others = [self.bench.run(start, split, step) for split in splits]
        suspect = next((i for i, other in enumerate(others) if self._differing(whole, other)), None)
        if suspect is not None:
            self._learn_rounding(start, step, {self.even: whole, splits[suspect]: others[suspect]})
        for other in others:
            found = self._differing(whole, other)
            for place, value in found.items():
                known = self.differing.get(place)
                if known is None or value > known.value:
                    self.differing[place] = _Difference(value, start, step, whole, other)
            self._follow(whole, other, found)
        return whole.after

    def _look_for_what_is_not_finite(self, result: Result) -> None:
        for place in self._relevant:
            c = self._contribution(place)
            if c.how.reduces and self._facts(place).of_data and not _is_finite(result.contributions[place]):
                self.not_finite[self._name(place)] = None
        for output, value in zip(self.outputs, result.outputs, strict=True):
            if output.kind == "state" and not _is_finite(value) and self.influence.of(output.atom).through:
                self.not_finite[output.name] = None

    def _differing(self, whole: Result, other: Result) -> dict[Place, float]:
        """Contributions that matter and differ by more than rounding, relative to their value."""
        found = {}
        for place in self._relevant:
            a, b = whole.contributions[place], other.contributions[place]
            gaps = _gaps(a, b)
            if not gaps.any():
                continue
            own, computed = self.precisions.of_place(place)
            value, allowed = np.maximum(np.abs(a), np.abs(b)), self._relative(own)
            floor = self.floors.contributions.get(place)
            ratio = _beyond(gaps, value, allowed * value, (own, computed), floor, by_element=self.tolerance is None)
            if ratio is not None:
                found[place] = ratio
            elif floor is not None and _is_noisy(gaps, value, allowed, floor) and not self._is_negligible(place, whole):
                self.noisy[self._name(place)] = _norm(floor) / (_norm(value) or 1.0)
        return found

    def _follow(self, whole: Result, other: Result, found: dict[Place, float]) -> None:
        """Note the outputs that differ because of those contributions."""
        for k, output in enumerate(self.outputs):
            through = [p for p in found if self._counts(p, output)]
            ratio = self._difference(k, whole, other, self.floors.outputs.get(k)) if through else None
            if ratio is None:
                continue
            noted = self.states if self._is_state(output) else self.reports
            _raise_to(noted, output.name, ratio)
            for place in through:
                _raise_to(self.reductions, self._name(place), found[place])

    def _difference(self, k: int, whole: Result, other: Result, floor: np.ndarray | None = None) -> float | None:
        """Return an output's difference relative to its change by the step; `None` if it is within rounding errors."""
        a, b = whole.outputs[k], other.outputs[k]
        own, _ = self.precisions.outputs[k]
        change = _changes(whole, k)
        allowed = self._relative(own) * change + 4 * own * np.abs(a)
        return _beyond(
            _gaps(a, b), change, allowed, self.precisions.outputs[k], floor, by_element=self.tolerance is None
        )

    def _relative(self, eps: float) -> float:
        return self.tolerance if self.tolerance is not None else _ROUNDING * eps

    # --- rounding -----------------------------------------------------------------------------------------------------

    def _learn_rounding(self, start: Start, step: int, trials: dict[Split, Result]) -> None:
        """Measure how far all values move when inputs move by their last place, or examples change places."""
        for split, result in trials.items():
            for whole in (False, True) * _NUDGES:
                nudged, batch = self.bench.nudged(start, self.rng, whole=whole)
                self.floors.add(result, self.bench.run(nudged, split, step, batch=batch), outputs=not whole)
        even = trials[self.even]
        for _ in range(_NUDGES):
            again = self.bench.run(start, self.even, step, batch=self.bench.reordered(self.even, self.rng))
            if self._has_place(even, again):
                break  # what is computed depends on an example's place in the call: this is no rounding
            self.floors.add(even, again)

    def _has_place(self, a: Result, b: Result) -> bool:
        """Whether anything that is no zero but for rounding differs by much more than rounding."""
        return any(
            _apart(a.contributions[p], b.contributions[p]) > 1e-3 * _norm(a.contributions[p])
            for p in self._relevant
            if self._contribution(p).how.reduces and not self._is_negligible(p, a)
        )

    def _is_negligible(self, place: Place, result: Result) -> bool:
        """Whether the elements of a contribution are so small beside those of others that they must be rounding: what
        the state follows beside what else it follows, and a loss beside losses.
        """
        of_state = bool(self._state_behind(place))
        peers = [p for p in self._relevant if bool(self._state_behind(p)) == of_state]
        largest = max(_rms(result.contributions[p]) for p in peers)
        return _rms(result.contributions[place]) <= _NEGLIGIBLE * largest

    # --- what counts --------------------------------------------------------------------------------------------------

    @cached_property
    def _relevant(self) -> list[Place]:
        """Contributions whose differences would count in some output."""
        return [p for p in self.influence.places if any(self._counts(p, output) for output in self.outputs)]

    def _counts(self, place: Place, output: Output) -> bool:
        """Whether an output may not follow a contribution that depends on the split."""
        of = self.influence.of(output.atom)
        unread = output.kind == "op_state" and not self._op_state_is_read(output)
        if unread or not of.through & self.influence.bit[place]:
            return False
        sent, c = self._facts(place), self._contribution(place)
        as_it_is = c.how.shows_workers and output.atom is c.result
        over_calls = bool(sent.sources) and MICROBATCHES.name in of.sources
        return self._is_state(output) or (sent.of_data and not as_it_is and not over_calls)

    def _is_state(self, output: Output) -> bool:
        of_state = output.kind == "op_state" and bool(self._op_states_of_state & 1 << output.number)
        return output.kind == "state" or of_state

    def _op_state_is_read(self, output: Output) -> bool:
        bit = 1 << output.number
        return any(self.influence.of(o.atom).op_states & bit for o in self.outputs if o != output)

    @cached_property
    def _op_states_of_state(self) -> int:
        """The operator states that some state is computed from, in the next step or later: a bit for each."""
        read = 0
        for o in self.outputs:
            read |= self.influence.of(o.atom).op_states if o.kind == "state" else 0
        while True:
            more = read
            for o in self.outputs:
                if o.kind == "op_state" and read & 1 << o.number:
                    more |= self.influence.of(o.atom).op_states
            if more == read:
                return read
            read = more

    def _hidden(self) -> list[Place]:
        """Return the places that differ although the outputs that depend on them do not, for instance because of a
        learning rate of zero.

        If the outputs don't react to one of these places alone, they hide the difference. If they react to each, and
        all places together make no difference, then the results are equal by the driver's arithmetic.
        """
        followed = {p: outputs for p in self.differing if self._facts(p).of_data and (outputs := self._unshown(p))}
        for place, outputs in followed.items():
            difference = self.differing[place]
            instead = self.bench.taking(difference.other, place)
            alone = self.bench.run(difference.start, self.even, difference.step, instead=instead)
            if all(self._difference(k, difference.even, alone) is None for k in outputs):
                return list(followed)
        return []

    def _unshown(self, place: Place) -> list[int]:
        """Return the outputs that depend on a contribution by more than a decision, and did not differ."""
        bit, shown = self.influence.bit[place], {**self.states, **self.reports}
        followers = enumerate(self.outputs)
        return [k for k, o in followers if o.name not in shown and self._counts(place, o) and self._steadily(o) & bit]

    def _undecided(self) -> dict[str, None]:
        """Names of contributions that differ, and that something which came out the same follows by decisions alone."""
        shown = {**self.states, **self.reports}
        found: dict[str, None] = {}
        for place in self.differing:
            bit = self.influence.bit[place]
            if any(
                o.name not in shown and self._counts(place, o) and self._decided(o) & ~self._steadily(o) & bit
                for o in self.outputs
            ):
                found[self._name(place)] = None
        return found

    def _steadily(self, output: Output) -> int:
        return self.influence.of(output.atom).steadily

    def _decided(self, output: Output) -> int:
        return self.influence.of(output.atom).decided

    def _state_behind(self, place: Place) -> list[int]:
        """Return the outputs of the state that depend on a contribution by more than a decision."""
        bit = self.influence.bit[place]
        return [
            k
            for k, output in enumerate(self.outputs)
            if self._is_state(output) and self.influence.of(output.atom).steadily & bit and self._counts(place, output)
        ]

    def _contribution(self, place: Place) -> Contribution:
        return self.plan.messages[place[0]][place[1]]

    def _facts(self, place: Place) -> Any:
        return self.influence.carried(self._contribution(place))

    def _name(self, place: Place) -> str:
        c = self._contribution(place)
        how = "" if c.how.reduces else f", by {c.how.name}"
        return f"{c.name or 'a value'}{how}{at(c.line)}"


class _Precisions:
    """For every contribution and output the distance from 1 to the next number: in the least precision that the driver
    has on the way to it, half precisions taken for single, and in that in which it is computed here.
    """

    def __init__(self, plan: Plan, influence: Influence, outputs: Sequence[Output], driver: Plan):
        given = influence if driver is plan else Influence(driver)
        self._same = given.places == influence.places
        self._driver, self._plan, self._given, self._influence = driver, plan, given, influence
        atoms = [o.atom for o in outputs]
        theirs = [o.atom for o in outputs_of(driver)]
        self.outputs = [self._both(given.of(t).eps, influence.of(a).eps) for a, t in zip(atoms, theirs, strict=True)]

    def of_place(self, place: Place) -> tuple[float, float]:
        level, i = place
        computed = self._influence.carried(self._plan.messages[level][i]).eps
        own = self._given.carried(self._driver.messages[level][i]).eps if self._same else _SINGLE_EPS
        return self._both(own, computed)

    def _both(self, own: float, computed: float) -> tuple[float, float]:
        return max(computed, min(own, _SINGLE_EPS)), computed


@dataclass
class _Floors:
    """The largest change of each element by rounding."""

    contributions: dict[Place, np.ndarray]
    outputs: dict[int, np.ndarray]

    def add(self, a: Result, b: Result, *, outputs: bool = True) -> None:
        for place, value in a.contributions.items():
            _raise_each(self.contributions, place, _gaps(value, b.contributions[place]))
        for k, value in enumerate(a.outputs if outputs else ()):
            _raise_each(self.outputs, k, _gaps(value, b.outputs[k]))


def _raise_to(found: dict, key: Any, value: float) -> None:
    found[key] = max(value, found.get(key, 0.0))


def _raise_each(found: dict, key: Any, values: np.ndarray) -> None:
    found[key] = np.maximum(values, found[key]) if key in found else values


def _beyond(
    gaps: np.ndarray,
    value: np.ndarray,
    allowed: np.ndarray,
    precisions: tuple[float, float],
    floor: np.ndarray | None,
    *,
    by_element: bool,
) -> float | None:
    """Return the difference of two arrays relative to their value; `None` if it may be rounding.

    Args:
      gaps, value: how far elements are apart, and how large they are.
      allowed: by how much an element may be off in the driver's own precision.
      precisions: the distance from 1 to the next number, in the driver's own precision, and in that in which they were
        computed.
      floor: by how much elements moved by rounding, if that has been looked at.
      by_element: whether one element can be too far off, or only all together.
    """
    own, computed = precisions
    noise = 0.0 if floor is None else _MULTIPLE * _norm(floor)
    if np.isinf(gaps).any() and np.isfinite(noise):
        return np.inf
    if _norm(gaps) > max(_norm(allowed), noise):
        return _norm(gaps) / (_norm(value) or 1.0)
    if not by_element or not gaps.size:
        return None
    least: Any = _OF_LARGEST * computed * float(value.max())
    if floor is not None:
        # Far below the driver's own precision each element has its own; else some would pass by chance.
        least = least + (_OF_ELEMENT * floor if computed < own else _MULTIPLE * float(floor.max()))
    off = gaps > allowed + least
    return float((gaps[off] / np.where(value[off] > 0, value[off], 1.0)).max()) if off.any() else None


def _is_noisy(gaps: np.ndarray, value: np.ndarray, allowed: float, floor: np.ndarray) -> bool:
    """Return whether a difference cannot be distinguished from rounding errors, which are too large."""
    return _norm(gaps) > allowed * _norm(value) and _norm(floor) > _NOISY * _norm(value)


def _some(names: dict[str, Any]) -> str:
    first, *others = names
    return f"{first} (and {len(others)} more)" if others else first


def _gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the distance of elements; infinite where only one of two is finite."""
    with np.errstate(all="ignore"):
        gaps = np.abs(_in_double(a) - _in_double(b))
    gaps = np.where((a == b) | ((a != a) & (b != b)), 0.0, gaps)
    return np.where(np.isfinite(gaps), gaps, np.inf)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return _norm(_gaps(a, b))


def _changes(result: Result, k: int) -> np.ndarray:
    """Return an output's change by the step; for metrics and hook values, which are new in each step, their value."""
    before, after = result.before[k], _in_double(result.outputs[k])
    return np.abs(after if before is None else after - _in_double(before))


def _in_double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _is_finite(x: np.ndarray) -> bool:
    return not np.issubdtype(x.dtype, np.inexact) or bool(np.isfinite(x).all())


def _norm(x: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(_in_double(x).reshape(-1)))


def _rms(x: np.ndarray) -> float:
    return _norm(x) / max(1, x.size) ** 0.5
