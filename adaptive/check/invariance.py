"""Checks that a step's result does not depend on the batch's split, as it does with batch norm or summed losses.

The check runs steps on one batch, split into equal shares and into random uneven ones of several microbatches: a few
consecutive steps and, if the driver reads the step number, some later ones. Every trial of a step starts from the same
state, so rounding errors do not grow from step to step. Trials run in double precision if possible.

Reduced messages are compared first, because their rounding errors have known bounds; then the state, metrics and hook
values. Optimizers such as Adam magnify rounding errors where gradients are near zero, so a difference in an output
counts only if a reduced value that it depends on differs too. Values are compared element by element, because many
optimizers treat elements separately. Rounding errors are measured for each leaf: inputs are perturbed by one unit in
the last place, and changes of the size that this causes do not count.

Some operators depend on the split by design. Metrics and hook values (not the state) may differ if all differing values
that they depend on are

    independent of examples         all_gather(compute_seconds()), ad.batch_size()
    gathered and not used further   all_gather(loss), a row for each worker
    statistics over microbatches    the noise scale, which reads the number of microbatches and their examples

The batch's shape, such as len(batch), is none of these: it is the size of one microbatch.

A decision (a comparison or argmax) can hide a difference, because it gives the same result until a threshold is
crossed. If only such decisions depend on a differing value, and they gave the same results, the answer is "not known".

Nothing is compared if local values differ between workers by design: averages over one worker's or some workers'
examples, or reductions in some steps only. Such a step depends on its split.
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
_ROUNDING = 100  # tolerance of a sum over a batch, in units in the last place
_MULTIPLE = 16  # tolerance, as a multiple of the effect of perturbed inputs
_NUDGES = 2
_NOISY = 0.03  # a value with a larger relative rounding error cannot be compared
_NEGLIGIBLE = 1e-4  # relative to other reduced values; smaller values count as 0 with rounding errors
_OF_ELEMENT = 100  # the same for a single element
_OF_LARGEST = 4  # smaller differences are ignored; in units in the last place of a leaf's largest element
_SINGLE_EPS = float(np.finfo(SINGLE).eps)


@dataclass(frozen=True)
class Invariance:
    """Result of `Program.check`: "yes", "no" or "not known". True only for "yes", so it can be asserted.

    Attributes:
      differences: state leaves that depend on the split, by name, with the largest difference relative to the step's
        change of that leaf. Includes operator states that the state is computed from.
      reports: metrics and hook values that depend on the split, with the largest difference relative to the value.
      reductions: reductions that cause the differences, such as "grads['kernel'] (driver.py:15)", with the largest
        difference relative to the value.
      hidden: reductions that differ without a difference in the outputs that depend on them, for instance because the
        learning rate was zero in these steps.
      splits: the splits that were tried: for each, every worker's microbatches.
      steps: the numbers of the steps that were tried.
      note: the reason for "not known"; else "".
      drawn: lines of the driver where one key draws random numbers for all examples of a microbatch.
      on_purpose: the collective by which workers differ by design, so that nothing was compared; else "".
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
        """ "yes", "no", or "not known" if not everything could be compared; `note` says why."""
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
      seed: seed of the random splits.
      tolerance: relative to the norm of a reduced value. By default, 100 units in the last place of each element.
      step: number of completed steps.
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
        with suppress(CannotWidenError, jax.errors.JaxRuntimeError):  # memory may not suffice
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
    """A contribution that differed, in the first step in which it did, with the data to examine it."""

    value: float  # relative to the contribution's value
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
            # All splits in the first step, one in each later step.
            splits = self.splits if step == first else [self.splits[step % len(self.splits)]]
            tried.append(step)
            start = self._of_step(start, step, splits)
            if self.states:
                break
        for step in [] if self.states or self.reports else self._later_steps(tried):
            tried.append(step)
            self._of_step(start, step, [self.splits[len(tried) % len(self.splits)]])
        if self._undecided():  # a maximum differs most between small microbatches
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
            return "nothing to compare: the state, metrics and hook values do not depend on examples."
        return ""

    # --- one step -----------------------------------------------------------------------------------------------------

    def _of_step(self, start: Start, step: int, splits: Sequence[Split]) -> Start:
        """Compare one step. Return the start of the next step."""
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
        """Return relevant contributions that differ by more than rounding errors, with the relative difference."""
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
        """Record the outputs that differ because of these contributions."""
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
        """Measure how values change if inputs change by one unit in the last place or examples are permuted."""
        for split, result in trials.items():
            for whole in (False, True) * _NUDGES:
                nudged, batch = self.bench.nudged(start, self.rng, whole=whole)
                self.floors.add(result, self.bench.run(nudged, split, step, batch=batch), outputs=not whole)
        even = trials[self.even]
        for _ in range(_NUDGES):
            again = self.bench.run(start, self.even, step, batch=self.bench.reordered(self.even, self.rng))
            if self._has_place(even, again):
                break  # results depend on an example's position in the microbatch, which is not a rounding error
            self.floors.add(even, again)

    def _has_place(self, a: Result, b: Result) -> bool:
        """Return whether a value that is not negligible differs by much more than rounding errors."""
        return any(
            _apart(a.contributions[p], b.contributions[p]) > 1e-3 * _norm(a.contributions[p])
            for p in self._relevant
            if self._contribution(p).how.reduces and not self._is_negligible(p, a)
        )

    def _is_negligible(self, place: Place, result: Result) -> bool:
        """Return whether a contribution's elements are so small that they must be rounding errors.

        They are compared with other contributions to the same kind of output: the state, or metrics.
        """
        of_state = bool(self._state_behind(place))
        peers = [p for p in self._relevant if bool(self._state_behind(p)) == of_state]
        largest = max(_rms(result.contributions[p]) for p in peers)
        return _rms(result.contributions[place]) <= _NEGLIGIBLE * largest

    # --- what counts --------------------------------------------------------------------------------------------------

    @cached_property
    def _relevant(self) -> list[Place]:
        """Return the contributions whose differences would count in some output."""
        return [p for p in self.influence.places if any(self._counts(p, output) for output in self.outputs)]

    def _counts(self, place: Place, output: Output) -> bool:
        """Return whether an output must not depend on a contribution that depends on the split."""
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
        """Return the operator states that the state of a later step is computed from; bit mask."""
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
        """Return the contributions that differ without a difference in the outputs that depend on them.

        Each contribution alone is replaced by its value under the other split. If the outputs do not change, they hide
        the difference, for instance because of a learning rate of zero. If they change for each one, but not for all
        together, the differences cancel by the driver's arithmetic, and nothing is hidden.
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
        """Return the outputs that depend on a contribution by more than decisions, and did not differ."""
        bit, shown = self.influence.bit[place], {**self.states, **self.reports}
        followers = enumerate(self.outputs)
        return [k for k, o in followers if o.name not in shown and self._counts(place, o) and self._steadily(o) & bit]

    def _undecided(self) -> dict[str, None]:
        """Return the names of differing contributions on which unchanged outputs depend by decisions alone."""
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
        """Return the outputs of kind "state" that depend on a contribution by more than decisions."""
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
    """Machine epsilon for every contribution and output: of the driver's lowest precision on the path to it (at most
    single), and of the precision of the trials.
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
      gaps, value: absolute differences of elements, and their magnitudes.
      allowed: tolerance of each element in the driver's own precision.
      precisions: machine epsilon of the driver's own precision, and of the precision of the trials.
      floor: measured rounding error of each element; `None` if not measured.
      by_element: whether single elements are compared, or only the norm.
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
        # In a higher precision than the driver's, each element has its own tolerance.
        least = least + (_OF_ELEMENT * floor if computed < own else _MULTIPLE * float(floor.max()))
    off = gaps > allowed + least
    return float((gaps[off] / np.where(value[off] > 0, value[off], 1.0)).max()) if off.any() else None


def _is_noisy(gaps: np.ndarray, value: np.ndarray, allowed: float, floor: np.ndarray) -> bool:
    """Return whether rounding errors are too large to recognize a difference."""
    return _norm(gaps) > allowed * _norm(value) and _norm(floor) > _NOISY * _norm(value)


def _some(names: dict[str, Any]) -> str:
    first, *others = names
    return f"{first} (and {len(others)} more)" if others else first


def _gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the absolute differences of elements; infinite where only one of the two is finite."""
    with np.errstate(all="ignore"):
        gaps = np.abs(_in_double(a) - _in_double(b))
    gaps = np.where((a == b) | ((a != a) & (b != b)), 0.0, gaps)
    return np.where(np.isfinite(gaps), gaps, np.inf)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return _norm(_gaps(a, b))


def _changes(result: Result, k: int) -> np.ndarray:
    """Return an output's change by the step, in double precision; for metrics and hook values, their value."""
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
