"""`ad.hyperparameter("lr", 0.1)`: a number in a driver that hooks may change while it runs.

A hyperparameter is an operator state that the driver does not write. So it is saved in checkpoints, sent to
joining workers, and equal on all workers, and a new value compiles nothing. The program writes it, between two steps.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DriverError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.numbers import reals, truths

from .operator_state import operator_state

Values = Mapping[str, Any]
Types = Mapping[str, np.dtype]

_LABEL = "hyperparameter "


def hyperparameter(name: str, value: Any) -> jax.Array:
    """Return a number, or a small array, that control hooks set: `control.set_hyperparameters(lr=0.05)`. Replicated.

        def driver(state, batch):
            lr = ad.hyperparameter("lr", 0.1)
            ...
            updates, opt_state = optax.sgd(lr, momentum=0.9).update(avg_grads, state.opt_state)

    A new value is in force from the next step on, without a compilation. Calls with the same name return the same
    value.

    Args:
      name: a Python identifier, the keyword of `control.set_hyperparameters`.
      value: the initial value: a number, a boolean, or an array of these. Later values have its shape and dtype; a
        Python float has JAX's default dtype.

    Returns:
      The value in this step; outside a program, `value`.

    Raises:
      DriverError: the name is not an identifier, or the value is traced, not finite, not numeric, or does not fit its
        dtype.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise DriverError(
            f"hyperparameter{at(current_line())}: the name must be an identifier, the keyword of "
            f"control.set_hyperparameters(…), such as 'lr'; got {name!r}."
        )
    numbers, what = truths(value) if reals(value) is None else reals(value), f"hyperparameter {name!r}"
    if numbers is None:
        raise DriverError(
            f"{what}{at(current_line())}: its initial value must be a finite number, or an array of them, that is "
            f"known before the first step; got {value!r}."
        )
    kind = np.asarray(value).dtype
    dtype = jax.dtypes.canonicalize_dtype(float if kind.kind == "O" else kind)
    first = _checked_for(f"{what}{at(current_line())}: its initial value", numbers, dtype)
    return operator_state(_LABEL + name, first.astype(dtype), lambda present: (present, present))


def name_of(name: str) -> str | None:
    """Return the name of the hyperparameter for an operator state's name, or None if it is not a hyperparameter."""
    label, found, _ = name.rpartition("/")
    return label.removeprefix(_LABEL) if found and label.startswith(_LABEL) else None


def checked_hyperparameters(known: Values, values: Values, types: Types = MappingProxyType({})) -> dict[str, Any]:
    """Return requested values as Python numbers and lists of numbers, after checking them.

    Args:
      known: the current values of all hyperparameters.
      types: the dtype of each; by default, JAX's default dtype for the value.

    Raises:
      DriverError: a name is unknown, or a value has a wrong shape or type.
    """
    if not values:
        raise DriverError(
            "set_hyperparameters() without a value: give one by its name, such as  set_hyperparameters(lr=0.05)."
        )
    return {name: _checked(known, types, name, value) for name, value in values.items()}


def _checked(known: Values, types: Types, name: str, value: Any) -> Any:
    if name not in known:
        there = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise DriverError(
            f"set_hyperparameters({name}=…): the driver has no hyperparameter {name!r}; {there}. A driver "
            f"reads one by\n"
            f'    {name} = ad.hyperparameter("{name}", …)'
        )
    present, what = np.asarray(known[name]), f"set_hyperparameters({name}={reprlib.repr(value)})"
    dtype = np.dtype(types.get(name, jax.dtypes.canonicalize_dtype(present.dtype)))
    numbers = truths(value) if dtype == np.bool_ else reals(value)
    if numbers is None or numbers.shape != present.shape:
        one = "True or False" if dtype == np.bool_ else "one number"
        raise DriverError(f"{what}: {name} must be {f'an array of shape {present.shape}' if present.shape else one}.")
    return _checked_for(f"{what}: {name}", numbers, dtype).tolist()


def _checked_for(what: str, numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return numbers of a kind that `dtype` has. Raises a DriverError about `what` if they do not fit it."""
    if not np.isfinite(numbers).all():
        raise DriverError(f"{what} is not finite. Check the value before, by np.isfinite.")
    if dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            fits = np.isfinite(numbers.astype(dtype))
    elif (numbers % 1).any():
        raise DriverError(f"{what} must be a whole number.")
    else:
        fits = (np.iinfo(dtype).min <= numbers) & (numbers <= np.iinfo(dtype).max)
        numbers = numbers.astype(int)
    if not fits.all():
        raise DriverError(f"{what} does not fit into {dtype}.")
    return numbers
