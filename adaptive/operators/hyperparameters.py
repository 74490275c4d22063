"""`ad.hyperparameter("lr", 0.1)`: a number in a driver that hooks may change while it runs.

A hyperparameter is an operator state that the driver does not write. So it is saved in checkpoints, sent to
joining workers, and equal on all workers, and a new value compiles nothing. The program writes it, between two steps.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DriverError
from adaptive.base.numbers import reals, truths, wholes, why_not_in
from adaptive.base.source_lines import at, current_line

from .operator_state import operator_state

_LABEL = "hyperparameter "


def hyperparameter(name: str, value: Any) -> jax.Array:
    """Return a number, or a small array, that control hooks set: `control.set(lr=0.05)`. Replicated.

        def driver(state, batch):
            lr = ad.hyperparameter("lr", 0.1)
            ...
            updates, opt_state = optax.sgd(lr, momentum=0.9).update(avg_grads, state.opt_state)

    A new value is in force from the next step on, without a compilation. Calls with the same name return the same
    value.

    Args:
      name: a Python identifier, the keyword of `control.set`.
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
            f"hyperparameter{at(current_line())}: the name must be an identifier, the keyword of control.set(…), such "
            f"as 'lr'; got {name!r}."
        )
    numbers = truths(value) if reals(value) is None else reals(value)
    if numbers is None or not np.isfinite(numbers).all():
        raise DriverError(
            f"hyperparameter {name!r}{at(current_line())}: its initial value must be a finite number, or an array of "
            f"them, that is known before the first step; got {value!r}."
        )
    first = np.asarray(value)
    integers = wholes(value) if first.dtype.kind in "iuO" else None
    if integers is not None:
        numbers = integers
    kind = first.dtype if first.dtype != object else float if integers is None else int
    dtype = jax.dtypes.canonicalize_dtype(kind)
    why = why_not_in(numbers, dtype)
    if why:
        raise DriverError(f"hyperparameter {name!r}{at(current_line())}: its initial value {why}.")
    return operator_state(_LABEL + name, numbers.astype(dtype), lambda present: (present, present))


def name_of(name: str) -> str | None:
    """Return the name of the hyperparameter for an operator state's name, or None if it is not a hyperparameter."""
    label, found, _ = name.rpartition("/")
    return label.removeprefix(_LABEL) if found and label.startswith(_LABEL) else None
