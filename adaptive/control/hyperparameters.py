"""The hyperparameters of a driver: their values in the next step, and checks of requested values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DriverError
from adaptive.base.numbers import reals, truths, wholes, why_not_in
from adaptive.graph.plan import OperatorState
from adaptive.operators.hyperparameters import name_of

Values = Mapping[str, Any]
Types = Mapping[str, np.dtype]
NONE: Values = MappingProxyType({})


class Hyperparameters:
    """The hyperparameters of one program. Replicated.

    Args:
      op_states: the plan's operator states.
      write: sets operator state number `k` from the next step on.
      read: returns operator state number `k`.

    Raises:
      DriverError: a hyperparameter has two initial values, or two types.
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


def checked_hyperparameters(known: Values, values: Values, types: Types = MappingProxyType({})) -> dict[str, Any]:
    """Return requested values as Python numbers and lists of numbers, after checking them.

    Args:
      known: the current values of all hyperparameters.
      types: the dtype of each; by default, JAX's default dtype for the value.

    Raises:
      DriverError: a name is unknown, or a value has a wrong shape or type.
    """
    if not values:
        raise DriverError("set() without a value: give one by its name, such as  set(lr=0.05).")
    return {name: _checked(known, types, name, value) for name, value in values.items()}


def _checked(known: Values, types: Types, name: str, value: Any) -> Any:
    if name not in known:
        there = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise DriverError(
            f"set({name}=…): the driver has no hyperparameter {name!r}; {there}. A driver reads one by\n"
            f'    {name} = ad.hyperparameter("{name}", …)'
        )
    present = np.asarray(known[name])
    dtype = np.dtype(types.get(name, jax.dtypes.canonicalize_dtype(present.dtype)))
    numbers = truths(value) if dtype == np.bool_ else reals(value)
    if numbers is None or numbers.shape != present.shape:
        one = "True or False" if dtype == np.bool_ else "one number"
        wanted = f"an array of shape {present.shape}" if present.shape else one
        raise DriverError(f"set({name}={_brief(value)}): {name} must be {wanted}.")
    if not (np.isfinite(numbers) | _is_whole(value, dtype)).all():
        raise DriverError(f"set({name}={_brief(value)}): not finite. Check the value before, by np.isfinite.")
    if dtype.kind in "iu":
        integers = wholes(value)
        if integers is None:
            raise DriverError(f"set({name}={_brief(value)}): {name} must be a whole number.")
        numbers = integers
    why = why_not_in(numbers, dtype)
    if why:
        raise DriverError(f"set({name}={_brief(value)}): {why}.")
    return numbers.tolist()


def _is_whole(value: Any, dtype: np.dtype) -> bool:
    """Return whether a value holds integers, of any size."""
    return dtype.kind in "iu" and wholes(value) is not None


def _shown(value: np.ndarray) -> str:
    return f"{value.tolist()} ({value.dtype})"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
