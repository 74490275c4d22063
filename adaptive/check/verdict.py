"""`Invariance`: what `Program.check` found, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .trials import Split


@dataclass(frozen=True)
class Invariance:
    """Result of `Program.check`. True only for "yes", so it can be asserted.

    Attributes:
      verdict: "yes", "no", or "not known" if not everything could be compared.
      differences: state leaves that depend on the split or on the number of workers, by name, with the largest
        difference relative to the step's change of that leaf. Includes operator states that the state is computed from.
      reports: the same for metrics and hook values, relative to the value.
      reductions: reductions that depend on it, such as "grads['kernel'] (driver.py:15)", relative to the value.
      wrong_means: monitors that are given a gradient and, as its mean over all examples, something else, such as
        "noise_scale (driver.py:20)", with the relative difference in a microbatch where both must be equal.
      splits: the random splits that were tried: for each, every worker's microbatches.
      steps: the numbers of the steps that were tried.
      note: why nothing is known, or why nothing had to be compared; else "".
      hints: causes that the driver's graph shows, with their lines and what to write instead.
    """

    verdict: Literal["yes", "no", "not known"]
    differences: dict[str, float] = field(default_factory=dict)
    reports: dict[str, float] = field(default_factory=dict)
    reductions: dict[str, float] = field(default_factory=dict, repr=False)
    wrong_means: dict[str, float] = field(default_factory=dict)
    splits: tuple[Split, ...] = field(default=(), repr=False)
    steps: tuple[int, ...] = field(default=(), repr=False)
    note: str = ""
    hints: tuple[str, ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return self.verdict == "yes"

    def __str__(self) -> str:
        steps = f"{len(self.steps)} steps" if len(self.steps) > 1 else "one step"
        tried = f"{len(self.splits)} random splits of {sum(map(sum, self.splits[0]))} examples" if self.splits else ""
        if self.verdict == "yes":
            return f"split-invariant: {tried} gave the same as equal shares, in {steps}."
        if self.note:
            known = "not split-invariant," if self.verdict == "no" else "not known whether the step is split-invariant:"
            return f"{known} {self.note}"
        lines = _listed(
            "these monitors are given a gradient, and a mean that is not its mean over all examples:",
            self.wrong_means,
            "its value, in one microbatch of one worker, where both must be equal",
        )
        lines += ["Pass what was averaged:  avg_grads = comm.all_reduce(grads)"] if self.wrong_means else []
        if self.differences or self.reports:
            lines += [
                f"not split-invariant: with {tried} and with fewer workers, in {steps},",
                *_listed("these leaves of the state come out differently:", self.differences, "its change"),
                *_listed("these metrics and hook values come out differently:", self.reports, "its value"),
                *_listed("through these reductions:", self.reductions, "its value"),
                *self.hints,
                _CAUSES,
            ]
        return "\n".join(lines)


_CAUSES = """Usual causes: batch normalization without axis_name="workers", a loss that is summed and not averaged
over examples, losses that couple examples of a batch, a mean of means, several steps on a local batch,
what wire= rounds away. See docs/sharp_bits.md."""


def _listed(title: str, found: dict[str, float], of: str) -> list[str]:
    return [title, *(f"  {name}   by {value:.2g} of {of}" for name, value in found.items())] if found else []
