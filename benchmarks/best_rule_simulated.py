"""`goodput_batch`, which predicts what a batch is worth, is near the best of several batch rules.

    python benchmarks/best_rule_simulated.py --write

Simulated training runs with known truth: the loss falls as a power of the useful examples; an example is useful by the
statistical efficiency of its batch; the noise scale grows as the loss falls; a step takes `a + batch / V` seconds. For
all combinations of three noise scales and three fixed costs of a step, the seconds to a loss with `goodput_batch` (with
the true noise scale, and with half and twice that), over those of the best of four rules: batches of 32, 128 and 512,
and `noise_batch`. (Aimed at: never more than 5 % behind the best of the rules.)
"""

from __future__ import annotations

import argparse
import math

import numpy as np
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
    """A simulated training run, in which a rule sets the batch of each step."""

    def __init__(self, rule: Rule, phi: float, fixed: float, seed: int, error: float):
        (self._batch, self._policy), self._phi, self._fixed, self._error = rule, phi, fixed, error
        self._state = self._policy.init(1)
        self._draw = np.random.default_rng(seed)
        self.clock = self.examples = self._useful = 0.0
        self._step, self._before = 0, (FIRST, math.nan)

    @property
    def loss(self) -> float:
        """The true loss."""
        return FLOOR + FALL * (1 + self._useful / SCALE) ** -POWER

    def step(self) -> None:
        """Take a step."""
        batch, phi = self._batch, self._phi * (1 + self._useful / SCALE) ** 0.7
        self._useful += batch * ctrl.timing.efficiency(phi, batch)
        self.examples += batch
        seconds = (self._fixed + batch / SPEED) * (1 + 0.02 * self._draw.standard_normal())
        self.clock += seconds
        self._step += 1
        self._decide(batch, self._error * phi)
        self._before = batch, seconds

    def _decide(self, batch: int, phi: float) -> None:
        previous, seconds = self._before
        noise = Bounds(phi, 0.9 * phi, 1.1 * phi)
        values = {"noise_scale": noise, "seconds": np.array([seconds - self._fixed]), "iteration_seconds": seconds}
        seen = Observation(
            step=self._step,
            epoch=self.examples / 1e6,
            values=tuple(values[name] for name in self._policy.reads),
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
        decision, self._state = self._policy.update(seen, self._state)
        if seen.due and decision is not None and decision.global_batch is not None:
            self._batch = decision.global_batch


def to_goal(rule: Rule, phi: float, fixed: float, seed: int, error: float = 1.0) -> float:
    """Return the seconds to the goal with a rule; `error`: the noise scale is measured as so many."""
    run = Run(rule, phi, fixed, seed, error)
    while run.loss > GOAL:
        run.step()
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
            medians = {
                name: float(np.median([to_goal(rule, phi, fixed, s) for s in range(args.seeds)]))
                for name, rule in rules().items()
            }
            best, times = min(medians, key=medians.get), {}
            goodput = FIRST, ctrl.goodput_batch(min_batch=FIRST, max_batch=LAST)
            for error in (1.0, 0.5, 2.0):
                title = "goodput_batch" + (f", {error:g} times the noise scale" if error != 1 else "")
                times[title] = [to_goal(goodput, phi, fixed, s, error) for s in range(args.seeds)]
            row = {"noise scale at first": f"{phi:g}", "fixed cost": f"{1e3 * fixed:g} ms", "best rule": best}
            row["worst rule"] = f"{max(medians.values()) / medians[best]:.2f}"
            for title, found in times.items():
                ratios = np.array(found) / medians[best]
                behind.setdefault(title, []).extend(ratios)
                row[title] = f"{np.median(ratios):.2f} ({ratios.min():.2f} – {ratios.max():.2f})"
            rows.append(row)
            print(row, flush=True)
    worst = ", ".join(f"{title} {np.mean(r):.2f} in the mean and {max(r):.2f} at most" for title, r in behind.items())
    notes = [
        f"Simulated; seconds to a loss over those of the best rule, known only afterwards; medians of {args.seeds} "
        f"seeds (least – most). Over all runs: {worst}.",
        "The loss is 0.05 + 2.25 (1 + e / 2000)^-0.5 after e useful examples; the noise scale grows as "
        "(1 + e / 2000)^0.7; 30,000 examples per second; jitter of 2 %.",
    ]
    report("goodput_batch against the best batch rule", rows, "best_rule_simulated.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
