"""The hyperparameters of a driver: their values in the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from adaptive.base.errors import DriverError
from adaptive.graph.plan import OperatorState
from adaptive.operators.hyperparameters import Types, Values, name_of


class Hyperparameters:
    """The hyperparameters of one program. Replicated. `write` sets operator state number `k` from the next step on, and
    `read` returns it. Raises DriverError if a hyperparameter has two initial values, or two types.
    """

    def __init__(
        self,
        op_states: Iterable[OperatorState],
        write: Callable[[int, np.ndarray], None],
        read: Callable[[int], np.ndarray],
    ):
        self._write, self._read = write, read
        self._op_states: dict[str, list[int]] = {}
        self._values: dict[str, np.ndarray] = {}
        for k, op_state in enumerate(op_states):
            name = name_of(op_state.name)
            if name is None:
                continue
            (first,) = op_state.init
            before = self._values.setdefault(name, first)
            if (before.dtype, before.tolist()) != (first.dtype, first.tolist()):
                raise DriverError(
                    f"hyperparameter {name!r} ({op_state.line}) is {_shown(before)} elsewhere, and {_shown(first)} "
                    "here; each name has one value. Call ad.hyperparameter once, and pass its result on."
                )
            self._op_states.setdefault(name, []).append(k)

    @property
    def values(self) -> Values:
        """The values in the next step, by name: numbers, and lists of numbers."""
        return {name: value.tolist() for name, value in self._values.items()} if self._values else {}

    @property
    def types(self) -> Types:
        """The dtype of each hyperparameter in the driver, by name."""
        return {name: value.dtype for name, value in self._values.items()}

    def request(self, values: Values) -> None:
        """Set values from the next step on. They must come from `checked_hyperparameters`."""
        for name, value in values.items():
            self._values[name] = np.asarray(value, self._values[name].dtype)
            for k in self._op_states[name]:
                self._write(k, self._values[name])

    def restart(self) -> None:
        """Read the values from the operator states, after a restore or a state transfer."""
        for name, (k, *_) in self._op_states.items():
            self._values[name] = self._read(k)


def _shown(value: np.ndarray) -> str:
    return f"{value.tolist()} ({value.dtype})"


NONE = Hyperparameters((), lambda *_: None, lambda _: np.zeros(()))  # of a driver without any
