"""`Invariance`: what `Program.check` found, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from .trials import Split


@dataclass(frozen=True)
class Invariance:
    """Result of `Program.check`: "yes", "no" or "not known". True only for "yes", so it can be asserted.

    Attributes:
      differences: state leaves that depend on the split, by name, with the largest difference relative to the step's
        change of that leaf. Includes operator states that the state is computed from.
      reports: metrics and hook values that depend on the split, with the largest difference relative to the value.
      reductions: reductions that depend on the split, such as "grads['kernel'] (driver.py:15)", with the largest
        difference relative to the value.
      splits: the splits that were tried: for each, every worker's microbatches.
      steps: the numbers of the steps that were tried.
      note: the reason for "not known"; else "".
      drawn: lines of the driver where one key draws random numbers for all examples of a microbatch.
      on_purpose: the collective by which workers differ by design, so that nothing was compared; else "".
      wrong_means: monitors that are given a gradient and, as its mean over all examples, something else, such as
        "noise_scale (driver.py:20)", with the relative difference in a microbatch where both must be equal.
      by_workers: state leaves, metrics and hook values that depend on the number of workers, by name, with the largest
        relative difference.
      counted: where the driver reads that number, such as "ad.num_workers() (driver.py:12)".
    """

    differences: dict[str, float] = field(default_factory=dict)
    reports: dict[str, float] = field(default_factory=dict)
    reductions: dict[str, float] = field(default_factory=dict)
    splits: tuple[Split, ...] = ()
    steps: tuple[int, ...] = ()
    note: str = ""
    drawn: tuple[str, ...] = ()
    on_purpose: str = ""
    wrong_means: dict[str, float] = field(default_factory=dict)
    by_workers: dict[str, float] = field(default_factory=dict)
    counted: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """ "yes", "no", or "not known" if not everything could be compared; `note` says why."""
        if self.differences or self.reports or self.on_purpose or self.wrong_means or self.by_workers:
            return "no"
        return "not known" if self.note else "yes"

    def __bool__(self) -> bool:
        return self.verdict == "yes"

    def __repr__(self) -> str:
        found = {name: [*getattr(self, name)] for name in ("differences", "reports", "wrong_means", "by_workers")}
        parts = [f"{name}={names}" for name, names in found.items() if names]
        parts += [f"note={self.note!r}"] if self.note else []
        return f"Invariance({', '.join([repr(self.verdict), *parts])})"

    def __str__(self) -> str:
        lines: list[str] = []
        if self.wrong_means:
            lines += _listed(
                "these monitors are given a gradient, and a mean that is not its mean over all examples:",
                self.wrong_means,
                "its value, in one microbatch of one worker, where both must be equal",
            )
            lines.append("Pass what was averaged:  avg_grads = comm.all_reduce(grads)")
        if self.by_workers:
            lines.append(f"the step depends on the number of workers, through {', '.join(self.counted)}.")
            what = "With fewer workers and the same examples, these come out differently:"
            lines += [*_listed(what, self.by_workers, "its change"), _WITHOUT_COUNT]
        if self.on_purpose:
            lines.append(_ON_PURPOSE.format(self.on_purpose))
        elif self.differences or self.reports:
            lines += self._differences()
        elif self.note:
            lines.append(f"not known whether the step is split-invariant: {self.note}")
        elif not self.by_workers:
            lines.append("split-invariant: {} gave the same as equal shares, in {}.".format(*self._tried()))
        return "\n".join(lines)

    def _tried(self) -> tuple[str, str]:
        steps = f"{len(self.steps)} steps" if len(self.steps) > 1 else "one step"
        return f"{len(self.splits)} random splits of {sum(map(sum, self.splits[0]))} examples", steps

    def _differences(self) -> list[str]:
        return [
            "not split-invariant: with {}, in {},".format(*self._tried()),
            *_listed("these leaves of the state come out differently:", self.differences, "its change"),
            *_listed("these metrics and hook values come out differently:", self.reports, "its value"),
            *_listed("through these reductions:", self.reductions, "its value"),
            *([_DRAWN.format(", ".join(self.drawn))] if self.drawn else []),
            _CAUSES,
        ]


_ON_PURPOSE = """not split-invariant, on purpose: {}.
The step uses local values that differ between workers, so it depends on how its batch is split.
Nothing was compared. To check the model itself, use synchronous SGD:
    strategy = sync.synchronous(optimizer)"""

_DRAWN = """Random numbers are drawn for a whole microbatch from one key ({}),
so those of an example depend on its index in the call. Draw them by example:
    flax linen  rngs={{"dropout": ad.batch_key()}}        flax nnx  nnx.Rngs(dropout=ad.batch_key())
    jax.vmap and equinox  ad.example_keys()        see docs/models.md"""

_CAUSES = """Usual causes: batch normalization without axis_name="workers", a loss that is summed and not averaged
over examples, losses that couple examples of a batch, a mean of means, several steps on a local batch,
what wire= rounds away. See docs/sharp_bits.md."""

_WITHOUT_COUNT = """If that is on purpose, the result changes whenever workers join or leave. If not: comm.all_reduce(x)
is the mean over all examples already, a reduced value must not be summed again, and a learning rate can follow
ad.global_batch()."""


def _listed(title: str, found: dict[str, float], of: str) -> list[str]:
    return [title, *(f"  {name}   by {value:.2g} of {of}" for name, value in found.items())] if found else []
