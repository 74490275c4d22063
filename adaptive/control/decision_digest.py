"""A digest of all decisions that were taken so far, by which processes see that they take the same.

Every process runs the same hooks on the same values, so it takes the same decisions. That it does is compared in every
step: the digest is part of the status that rides on its last message (`status.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

from adaptive.base.decision import Decision
from adaptive.base.errors import DisagreementError
from adaptive.base.source_lines import name_workers

_BITS = 24  # a float32 holds whole numbers of so many exactly
_REMEMBERED = 4  # requests that were not compared; a program without messages never compares
_HOOK = "hook"


class DecisionDigest:
    """Of every decision so far, with what is known of those that have not been compared yet.

    Attributes:
      value: a positive whole number, which a float32 holds.
      step: after which the last decision was taken; 0 before the first.
      asked: in words, who asked for what since processes last compared, or, if nobody has since, before it. At most the
        last few.
    """

    def __init__(self) -> None:
        self.value = 1
        self.step = 0
        self.asked: tuple[str, ...] = ("nothing was decided yet",)
        self._compared = True

    @property
    def last(self) -> str:
        """`asked`, as one text."""
        return "; then ".join(self.asked)

    def enter(self, step: int, who: str, decision: Decision | None) -> None:
        """Note what was asked for after `step`, even if that is nothing.

        Args:
          who: `hooks_in_words`, or the call of a script: "program.rescale".
        """
        self.step = step
        self._note(f"{who} asked for {_wish(decision)}")
        if decision:
            values = sorted(decision.hyperparameters.items())
            asked = (decision.global_batch, decision.shares, decision.stop, decision.workers, *values)
            self.value = _digest(repr((self.value, step, *asked)))

    def _note(self, text: str) -> None:
        self.asked = (text,) if self._compared else (*self.asked, text)[-_REMEMBERED:]
        self._compared = False

    def restart(self, step: int, digests: Mapping[str, str]) -> None:
        """Begin anew after a restored step: equal on all processes that restored the same, whatever they did before,
        and unlike that of one which has not restored.
        """
        self.step = step
        self._note(f"program.restore went back to step {step}")
        self.value = _digest(repr(sorted(digests.items())))

    def export(self) -> tuple[int, int, tuple[str, ...]]:
        """Return the replicated part of the state, for `adopt` on a joining process."""
        return self.value, self.step, self.asked

    def adopt(self, exported: tuple[int, int, tuple[str, ...]]) -> None:
        """Replace the state with what another process has exported."""
        self.value, self.step, self.asked = exported

    def compare(self, values: np.ndarray, *, own: range) -> None:
        """Raise where some worker's digest is another than this one.

        Args:
          values: every worker's; shape=(workers,).
          own: the workers of this process.

        Raises:
          DisagreementError: some worker has decided otherwise.
        """
        told = values.tolist()
        if told.count(self.value) == len(told):
            self._compared = True
            return
        others = np.flatnonzero(values != self.value)
        raise DisagreementError(
            f"workers decided differently after step {self.step}: {name_workers(others.tolist())} "
            f"did not do what this process ({name_workers(own)}) did.\n"
            f"Here {self.last}.\n" + self._advice()
        )

    def _advice(self) -> str:
        by_hook = [text.startswith(_HOOK) for text in self.asked]
        advice = []
        if any(by_hook):
            advice.append("A hook must decide from its arguments alone: no rank, clock, random number or file.")
        if not all(by_hook):
            advice.append(
                "What a script asks of a program between two steps, it must ask on every process alike, with the same "
                "values: by no rank, clock, random number or file. To take one's values:  comm.broadcast(x)"
            )
        return "\n".join(advice)


def hooks_in_words(names: Sequence[str]) -> str:
    """Return "hook 'grow'", or "hooks 'grow', 'stop'"."""
    return f"{_HOOK}{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


def _digest(text: str) -> int:
    return crc32(text.encode()) % (2**_BITS - 1) + 1


def _wish(decision: Decision | None) -> str:
    if not decision:
        return "nothing"
    asked = {"workers": decision.workers, "global_batch": decision.global_batch, "shares": decision.shares}
    sizes = [f"{name}={value}" for name, value in asked.items() if value is not None]
    values = [f"{name}={value}" for name, value in decision.hyperparameters.items()]
    calls = [f"{call}({', '.join(what)})" for call, what in (("rescale", sizes), ("set", values)) if what]
    return " and ".join(calls + ["stop()"] * decision.stop)
