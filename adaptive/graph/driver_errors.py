"""Errors that JAX or numpy raises while a driver is traced, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax

from adaptive.base.errors import CollectiveError, DriverError
from adaptive.base.process.source_lines import at, line_of_error

_UNBOUND = re.compile(r"unbound axis name: (\w+)")
_NO_ARRAY = re.compile(r"returned a value of type <class '(?:\w+\.)*(\w+)'> at output component \[(\d)\](\S*?),")
_NOT_A_NUMBER = (
    jax.errors.ConcretizationTypeError,  # also of `if`, float(), int() and item()
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_NOT_KNOWN = re.compile(r"DynamicJaxprTracer\.__format__|Shapes must be 1D sequences of concrete values")


def name_of(driver: Callable) -> str:
    """Return the driver's name in errors."""
    return getattr(driver, "__name__", type(driver).__name__)


def kept(name: str) -> DriverError:
    """Return the error for a driver that keeps a traced value."""
    return DriverError(
        f"driver {name!r} keeps a traced value. The driver is only traced, so that value is not a number, and "
        "no step updates it. What changes from step to step belongs into the state, and what is to be seen into the "
        'metrics:\n    return {**state, "w": new_w}, {"loss": loss}'
    )


def explained(error: Exception, driver: Callable) -> Exception:
    """Return the error to raise for an error that the driver raised in its trace: the same, with a note, or another."""
    name, where = name_of(driver), at(line_of_error(error))
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return kept(name)
    axis = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    if axis:
        return CollectiveError(
            f"driver {name!r}{where} reduces over the axis {axis[1]!r}, which a driver does not have: it is not run "
            "by jax.pmap or jax.shard_map. Reduce over the workers by\n"
            '    comm.all_reduce(x)      the mean over all examples; op="sum", "max" or "min" for others\n'
            "    comm.all_gather(x)      one row per worker\n"
            'A layer that computes a mean in the model is given  axis_name="workers"  (docs/models.md).'
        )
    returned = _NO_ARRAY.search(str(error)) if isinstance(error, TypeError) else None
    if returned:
        what = f"the metric {returned[3]}".rstrip() if returned[2] == "1" else f"the state{returned[3]}"
        return DriverError(
            f"driver {name!r} returns {what} as a {returned[1]}, which is not an array of numbers. State and metrics "
            "are pytrees of arrays and numbers; write text and other objects to a log of your own."
        )
    if isinstance(error, _NOT_A_NUMBER) or _NOT_KNOWN.search(str(error)):
        error.add_note(
            f"driver {name!r}{where}: a driver is traced, so its values are not numbers yet. Write\n"
            "    jnp.where(condition, a, b)      instead of  if condition: …, and of  x[mask]\n"
            '    return state, {"loss": loss}    instead of  float(loss), loss.item(), np.asarray(loss)\n'
            "    ctrl.hook(fn, loss)             for what Python decides by a number: fn(control, loss)\n"
            "    jnp.asarray(table)[i]           instead of  table[i]  of a numpy array\n"
            "    ad.capacity()                   instead of  ad.num_workers()  in a shape: the number of worker slots\n"
            '    jax.debug.print("{}", loss)     to print'
        )
    return error


def in_short(error: Exception) -> str:
    """Return an error's type and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def only_for_more(error: Exception, driver: Callable, examples: int) -> DriverError:
    """Return the error for a driver that can be traced for some numbers of examples, but not for `examples`."""
    return DriverError(
        f"driver {name_of(driver)!r}{at(line_of_error(error))} cannot run on {examples} example{'s' * (examples != 1)}"
        f" ({in_short(error)}). A worker's batch runs as microbatches of any size, and there are some of 1 or 3 "
        "examples whenever it is divided: by microbatch=, by shares=, by rescale(). Write the driver for any number of "
        "examples:\n"
        "    jax.lax.top_k(x, min(4, len(x)))      instead of  jax.lax.top_k(x, 4)\n"
        "    ad.minibatches(batch, 4)              instead of  jnp.split(x, 4): all sizes are multiples of 4 then\n"
        "or keep the first sizes: resizable=False, without microbatch=, and a global_batch of which every worker gets "
        "enough."
    )
