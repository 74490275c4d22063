"""To learn by trial which of several batch rules pays costs more than to predict it from noise scale and seconds.

    python benchmarks/best_rule_simulated.py --write

Simulated training runs with known truth: the loss falls as a power of the useful examples; an example is useful by the
statistical efficiency of its batch; the noise scale grows as the loss falls; a step takes `a + batch / V` seconds. For
all combinations of three noise scales and three fixed costs of a step, the seconds to a loss with

* each of the rules: batches of 32, 128 and 512, and `noise_batch`;
* a bandit over these four, with windows of 2 and of 5 % of the best rule's examples (`_bandit.py`);
* `goodput_batch`, which tries nothing: with the true noise scale, and with half and twice that.

(Aimed at: never more than 5 % behind the best of the rules.)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
from _bandit import Bandit
from _measure import report

import controllers as ctrl
from adaptive.base.decision import Limits, Observation
from controllers.policies.efficiency import Bounds

FIRST, LAST, BETWEEN = 32, 2048, 20
FLOOR, FALL, POWER, SCALE, GOAL = 0.05, 2.25, 0.5, 2000.0, 0.25  # of the loss by useful examples
SPEED = 30_000.0  # examples per second
Rule = tuple[int, ctrl.Policy]  # its first batch, and the policy for those that follow


def rules() -> dict[str, Rule]:
    """Return the rules to choose from."""
    fixed: dict[str, Rule] = {f"batch {batch}": (batch, ctrl.schedule({0: batch})) for batch in (32, 128, 512)}
    return fixed | {"noise_batch": (FIRST, ctrl.noise_batch(min_batch=FIRST, max_batch=LAST))}


class Run:
    """A simulated training run, in which one of several rules sets the batch of each step."""

    def __init__(self, rules: Sequence[Rule], phi: float, fixed: float, seed: int, error: float = 1.0):
        self._rules, self._phi, self._fixed, self._error = rules, phi, fixed, error
        self._states = [policy.init(1) for _, policy in rules]
        self._batches = [first for first, _ in rules]  # that each rule had last
        self._draw = np.random.default_rng(seed)
        self.clock = self.examples = self._useful = 0.0
        self._step, self._before = 0, (FIRST, math.nan)

    @property
    def loss(self) -> float:
        """The true loss."""
        return FLOOR + FALL * (1 + self._useful / SCALE) ** -POWER

    def step(self, active: int) -> tuple[int, float]:
        """Take a step with the batch of the active rule. Returns the batch, and the loss over its examples."""
        batch, phi = self._batches[active], self._phi * (1 + self._useful / SCALE) ** 0.7
        self._useful += batch * ctrl.timing.efficiency(phi, batch)
        self.examples += batch
        seconds = (self._fixed + batch / SPEED) * (1 + 0.02 * self._draw.standard_normal())
        self.clock += seconds
        self._step += 1
        self._decide(active, batch, self._error * phi)
        self._before = batch, seconds
        return batch, self.loss * (1 + self._draw.standard_normal() / math.sqrt(batch))

    def _decide(self, active: int, batch: int, phi: float) -> None:
        (_, rule), (previous, seconds) = self._rules[active], self._before
        noise = Bounds(phi, 0.9 * phi, 1.1 * phi)
        values = {"noise_scale": noise, "seconds": np.array([seconds - self._fixed]), "iteration_seconds": seconds}
        seen = Observation(
            step=self._step,
            epoch=self.examples / 1e6,
            values=tuple(values[name] for name in rule.reads),
            batch_sizes=(batch,),
            previous_batch_sizes=(previous,),
            global_batch=batch,
            limits=Limits((1,), (LAST,)),
            due=self._step % BETWEEN == 0,
            members=(0,),
            target_workers=1,
            least_workers=1,
            most_workers=1,
        )
        decision, self._states[active] = rule.update(seen, self._states[active])
        if seen.due and decision is not None and decision.global_batch is not None:
            self._batches[active] = decision.global_batch


def alone(rule: Rule, phi: float, fixed: float, seed: int, error: float = 1.0) -> tuple[float, float]:
    """Return the seconds and examples to the goal with one rule; `error`: the noise scale is measured as so many."""
    run = Run([rule], phi, fixed, seed, error)
    while run.loss > GOAL:
        run.step(0)
    return run.clock, run.examples


def by_bandit(window: float, phi: float, fixed: float, seed: int) -> float:
    """Return the seconds to the goal with a bandit over all rules."""
    run, bandit = Run(list(rules().values()), phi, fixed, seed), Bandit(len(rules()), window)
    while run.loss > GOAL:
        batch, loss = run.step(bandit.rule)
        bandit.see(batch, run.clock, loss)
    return run.clock


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows, behind = [], dict[str, list[float]]()
    for phi in (30.0, 200.0, 1500.0):
        for fixed in (1e-3, 5e-3, 5e-2):
            singles = {name: [alone(rule, phi, fixed, s) for s in range(args.seeds)] for name, rule in rules().items()}
            medians = {name: np.median(found, axis=0) for name, found in singles.items()}
            best = min(medians, key=lambda name: medians[name][0])
            seconds, examples = medians[best]
            times = {
                f"bandit, windows of {share:.0%}": [
                    by_bandit(share * examples, phi, fixed, s) for s in range(args.seeds)
                ]
                for share in (0.02, 0.05)
            }
            goodput = FIRST, ctrl.goodput_batch(min_batch=FIRST, max_batch=LAST)
            for error in (1.0, 0.5, 2.0):
                title = "goodput_batch" + (f", {error:g} times the noise scale" if error != 1 else "")
                times[title] = [alone(goodput, phi, fixed, s, error)[0] for s in range(args.seeds)]
            row = {"noise scale at first": f"{phi:g}", "fixed cost": f"{1e3 * fixed:g} ms", "best rule": best}
            row["worst rule"] = f"{max(found[0] for found in medians.values()) / seconds:.2f}"
            for title, found in times.items():
                ratios = np.array(found) / seconds
                behind.setdefault(title, []).extend(ratios)
                row[title] = f"{np.median(ratios):.2f} ({ratios.min():.2f} – {ratios.max():.2f})"
            rows.append(row)
            print(row, flush=True)
    worst = ", ".join(f"{title} {np.mean(r):.2f} in the mean and {max(r):.2f} at most" for title, r in behind.items())
    notes = [
        f"Simulated; seconds to a loss over those of the best rule, known only afterwards; medians of {args.seeds} "
        f"seeds (least – most). Over all runs: {worst}.",
        "The loss is 0.05 + 2.25 (1 + e / 2000)^-0.5 after e useful examples, observed with a relative noise of "
        "1 / sqrt(batch); the noise scale grows as (1 + e / 2000)^0.7; 30,000 examples per second; jitter of 2 %.",
    ]
    report("Batch rules: learned by trial, or predicted", rows, "best_rule_simulated.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
