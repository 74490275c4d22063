"""A digest of all decisions so far, by which processes check that they make the same decisions.

Every process runs the same hooks on the same values, so it makes the same decisions. Each step checks this: the digest
is part of the status in its last message (`status.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

from adaptive.base.decision import Decision
from adaptive.base.errors import DisagreementError
from adaptive.base.process.source_lines import at, name_workers

_BITS = 22  # a float32 represents integers of 24 bits exactly, and the status adds two (`status.py`)
_REMEMBERED = 4  # most requests since the last comparison; a program without messages never compares
_Asked = tuple[str, Decision | None]  # who, and what


class DecisionDigest:
    """Digest of all decisions so far, with a description of those that have not been compared yet; `hook_lines`: the
    line of each hook in the driver, by name.
    """

    TRANSFERRED = ("value", "step", "_asked")  # what a joining process takes over from the others

    def __init__(self, hook_lines: Mapping[str, str] | None = None) -> None:
        self.value = 1  # the digest, a positive integer that a float32 represents exactly
        self.step = 0  # after which the last decision was made; 0 before the first
        self._asked: tuple[str | _Asked, ...] = ("nothing was decided yet",)
        self._compared = True
        self._hook_lines = hook_lines or {}

    @property
    def last(self) -> str:
        """`asked`, as one text."""
        return "; then ".join(self.asked)

    def enter(self, step: int, who: str, decision: Decision | None) -> None:
        """Add the requests made after `step` to the digest; `decision` is None if there are none.

        Args:
          who: `hooks_in_words`, or the method that the script called: "program.rescale".
        """
        self.step = step
        self._note((who, decision))
        if decision:
            values = sorted(decision.hyperparameters.items())
            asked = (decision.global_batch, decision.stop, decision.workers, *values)
            self.value = _digest(repr((self.value, step, *asked)).encode() + _bytes_of(decision.shares))

    @property
    def asked(self) -> tuple[str, ...]:
        """Descriptions of the last few requests since processes last compared; if there are none, of those before."""
        return tuple(text if isinstance(text, str) else f"{text[0]} asked for {_wish(text[1])}" for text in self._asked)

    def _note(self, text: str | _Asked) -> None:
        self._asked = (text,) if self._compared else (*self._asked, text)[-_REMEMBERED:]
        self._compared = False

    def restart(self, step: int, digests: Mapping[str, str]) -> None:
        """Reset after `program.restore`: the digest becomes equal on all processes that restored the same checkpoint,
        and differs from that of a process that did not.
        """
        self.step = step
        self._note(f"program.restore went back to step {step}")
        self.value = _digest(repr(sorted(digests.items())).encode())

    def compare(self, values: np.ndarray, *, own: range) -> None:
        """Compare the digests of all workers with this one; `own`: the workers of this process. Raises a
        DisagreementError if one differs.
        """
        if (values == self.value).all():
            self._compared = True
            return
        others = np.flatnonzero(values != self.value)
        raise DisagreementError(
            f"workers decided differently after step {self.step}: {name_workers(others.tolist())} "
            f"did not do what this process ({name_workers(own)}) did.\n"
            f"Here {self.last}.\n" + self._advice()
        )

    def _advice(self) -> str:
        by_hook, advice = [text.startswith("hook") for text in self.asked], []
        if any(by_hook):
            lines = self._hook_lines.items()
            named = [f"{name!r}{at(line)}" for name, line in lines if repr(name) in self.last and line]
            look = f" Look at {', '.join(named)}." if named else ""
            advice.append(f"A hook must decide from its arguments alone: no rank, clock, random number or file.{look}")
        if not all(by_hook):
            advice.append(
                "A script must make the same requests of a program on every process, with the same values: from no "
                "rank, clock, random number or file. To use one worker's values:  comm.broadcast(x)"
            )
        return "\n".join(advice)


def _digest(data: bytes) -> int:
    return crc32(data) % (2**_BITS - 1) + 1


def _bytes_of(shares: Sequence[float] | None) -> bytes:
    """Return shares as bytes: of thousands of workers, their text takes a millisecond."""
    return b"" if shares is None else b"shares" + np.asarray(shares, np.float64).tobytes()


def _wish(decision: Decision | None) -> str:
    if not decision:
        return "nothing"
    asked = {"workers": decision.workers, "global_batch": decision.global_batch, "shares": decision.shares}
    sizes = [f"{name}={value}" for name, value in asked.items() if value is not None]
    values = [f"{name}={value}" for name, value in decision.hyperparameters.items()]
    calls = [
        f"{call}({', '.join(what)})" for call, what in (("rescale", sizes), ("set_hyperparameters", values)) if what
    ]
    return " and ".join(calls + ["stop()"] * decision.stop)
