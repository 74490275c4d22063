"""Checks and normal forms of the arguments of `Program`."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.errors import CollectiveError, DriverError
from adaptive.base.local_mesh import LocalMesh
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.split import positive
from adaptive.base.values.arrays import NotAnArrayError, check_not_sharded, on_host
from adaptive.base.values.current import current_world, why_not_alone
from adaptive.base.values.numbers import whole
from adaptive.base.values.tree_paths import leaf_names
from adaptive.base.world import World
from adaptive.runtime.local_world import LocalWorld

Driver = Callable[[Any, Any], tuple[Any, Any]]
NonFinite = Literal["raise", "skip", "allow"]


def world_of(world: World | None) -> World:
    """Return the given world; by default the current one, or this process alone. Raises a DriverError if the
    argument is no world, or none is given and this process is one of several.
    """
    if callable(world):
        name = getattr(world, "__name__", "comm.world")
        raise DriverError(f"world= is {name}, which makes a world when it is called. Write  world=comm.{name}()")
    if world is not None and not all(hasattr(world, name) for name in ("capacity", "processes", "workers")):
        raise DriverError(
            f"world= must be a world, such as  comm.world()  or  comm.SoloWorld(); got {world!r}. comm.world() finds "
            "out how the job was launched."
        )
    alone = None if world is not None else why_not_alone()
    if alone:
        raise DriverError(
            f"ad.Program{at(current_line())} has no world: {alone}. Each process would train a model of its own. "
            "Write\n"
            "    with comm.world() as world:\n"
            "        program = ad.Program(..., world=world)\n"
            "or, to train separate models,  world=comm.SoloWorld()"
        )
    return world or current_world.get() or LocalWorld()


_built: WeakKeyDictionary[World, int] = WeakKeyDictionary()  # number of programs built by all processes, by world


def next_name(world: World, driver: Driver) -> str:
    """Return the name of the next program, for errors and messages. Equal on all processes, as they build programs in
    the same order.
    """
    return f"program {_built.get(world, 0) + 1} ({getattr(driver, '__name__', type(driver).__name__)!r})"


def built_in(world: World) -> None:
    """Record that all processes have built another program in this world."""
    _built[world] = _built.get(world, 0) + 1


def check_driver(driver: Any) -> None:
    """Raise a DriverError unless a driver can be called with a state and a batch."""
    name = getattr(driver, "__name__", type(driver).__name__)
    if not callable(driver) or isinstance(driver, type):
        what = f"the class {name}; pass a method of an instance" if isinstance(driver, type) else reprlib.repr(driver)
        raise DriverError(f"the driver must be a function, driver(state, batch) -> (state, metrics); got {what}.")
    try:
        signature = inspect.signature(driver)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise DriverError(
            f"driver {name!r} is called as {name}(state, batch), but its signature is {name}{signature}: {error}. Give "
            "it other arguments in advance:\n    functools.partial(driver, model)      or a function within a function"
        ) from error


def flag(name: str, value: Any) -> bool:
    """Return a user's True or False, the argument `name`, as a boolean. Raises a DriverError if it is neither."""
    if not isinstance(value, bool | np.bool_):
        raise DriverError(f"{name} must be True or False; got {value!r}.")
    return bool(value)


def count(name: str, value: Any, *, least: int | None = None) -> int:
    """Return a user's number, the argument `name`, as an integer. Raises a DriverError for another value."""
    number = whole(value)
    if number is None:
        raise DriverError(f"{name} must be a whole number; got {value!r}.")
    if least is not None and number < least:
        raise DriverError(f"{name} must be {'positive' if least else '0 or more'}; got {value}.")
    return number


@dataclass
class Options:
    """The arguments of `Program` besides the driver, its state, its data and the world, in normal form: see there.

    Raises:
      DriverError: a seed, a flag or `nonfinite` is invalid.
      BatchSizeError: `microbatch` is.
    """

    global_batch: int
    seed: int
    shares: Sequence[float] | None
    microbatch: int | None
    max_local_batch: Any
    nonfinite: NonFinite
    per_worker_state: Callable[[Any], Any] | None
    deterministic: bool
    resizable: bool

    def __post_init__(self) -> None:
        if self.nonfinite not in ("raise", "skip", "allow"):
            raise DriverError(f'nonfinite must be "raise", "skip" or "allow"; got {self.nonfinite!r}.')
        self.seed = count("seed", self.seed)
        self.microbatch = None if self.microbatch is None else positive("microbatch", self.microbatch)
        self.deterministic = flag("deterministic", self.deterministic)
        self.resizable = flag("resizable", self.resizable)

    @property
    def is_auto(self) -> bool:
        """Whether local batches are bounded by memory."""
        return isinstance(self.max_local_batch, str) and self.max_local_batch == "auto"

    @property
    def settings(self) -> dict[str, Any]:
        """Those that a record names, and that must be equal on all processes."""
        names = ("max_local_batch", "microbatch", "seed", "nonfinite", "resizable", "deterministic")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class StateForm:
    """The structure, shapes and dtypes of a program's state. Holds none of its arrays.

    Attributes:
      shapes: the state with shapes for leaves; weakly typed for Python numbers.
      local: indices of the leaves that may differ between workers by design.
    """

    shapes: Any
    local: frozenset[int]

    @staticmethod
    def of(state: Any, local: Callable[[Any], Any] | None, mesh: LocalMesh | None) -> tuple[StateForm, list[Any]]:
        """Check the initial state; return its form and its leaves as numpy or JAX arrays, without a copy
        where possible. `mesh`: on which a worker computes, over which leaves may be sharded; `None` for a device.

        Raises:
          DriverError: a leaf is not an array of numbers, or is sharded, but not over `mesh`; or `local` does not return
            parts of the state.
        """
        leaves, tree = jax.tree.flatten(state)
        names = leaf_names(state, "state")
        arrays = [_as_array(a, name, state, mesh) for a, name in zip(leaves, names, strict=True)]
        shapes = [
            jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=_is_weak(leaf))
            for array, leaf in zip(arrays, leaves, strict=True)
        ]
        return StateForm(tree.unflatten(shapes), _picked(local, tree)), arrays

    def as_given(self, leaves: list[jax.Array], weak: list[bool]) -> Any:
        """Return the state in the user's structure, weakly typed where the driver's leaves are (`weak`).

        The arrays do not show that: a worker without examples has its initial leaves, others have results of a step.
        """
        values = [jnp.asarray(leaf.item()) if w else _strong(leaf) for leaf, w in zip(leaves, weak, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self.shapes), values)


def made_by(state: Any) -> Any:
    """Return the result of a function of no arguments, and anything else unchanged. Raises a DriverError if a function
    has arguments.
    """
    if not (inspect.isroutine(state) or isinstance(state, partial)):
        return state
    try:
        inspect.signature(state).bind()
    except TypeError as error:
        raise DriverError(
            f"the state is a function with arguments ({error}). A function that returns the initial state takes none"
        ) from error
    return state()


def _strong(leaf: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _is_weak(leaf: Any) -> bool:
    """Return whether JAX treats a number as weakly typed, like those of Python."""
    if isinstance(leaf, jax.Array):
        return leaf.ndim == 0 and bool(getattr(leaf, "weak_type", False))
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)


def _as_array(leaf: Any, name: str, state: Any, mesh: LocalMesh | None) -> Any:
    try:
        if mesh is None:
            check_not_sharded(leaf)
        elif mesh.of_leaf(leaf) is not None:
            return leaf
    except (NotAnArrayError, CollectiveError) as error:
        raise DriverError(f"{name} {error}") from error
    if isinstance(leaf, jax.Array):
        return leaf if leaf.is_fully_addressable else leaf.addressable_data(0)  # the whole array is on each device
    try:
        return on_host(leaf)
    except NotAnArrayError as error:
        what = getattr(leaf, "__qualname__", None) or reprlib.repr(leaf)
        raise DriverError(
            f"the state holds {what}, which is not an array of numbers, at {name}: it "
            f"{'is a function.' if callable(leaf) else error} A state consists of arrays and numbers that "
            "change from step to step. The driver can close over other objects" + _how_to_part(state)
        ) from error


def _how_to_part(state: Any) -> str:
    """Return advice on how to separate arrays from the rest, if the library of the state has a function for it."""

    def is_equinox(node: Any) -> bool:
        return any(kind.__module__.partition(".")[0] == "equinox" for kind in type(node).__mro__)

    if not any(map(is_equinox, jax.tree.leaves(state, is_leaf=is_equinox))):
        return "."
    return (
        "; for an equinox model, over all but its arrays:\n"
        "    params, static = eqx.partition(model, eqx.is_array)      # params: into the state\n"
        "    model = eqx.combine(params, static)                      # in the driver\n"
        "See examples/equinox_mlp.py."
    )


_PICKED = "lambda state: state['momentum']"


def _picked(pick: Callable[[Any], Any] | None, tree: jax.tree_util.PyTreeDef) -> frozenset[int]:
    """Return the numbers of the leaves that `per_worker_state=` selects."""
    if pick is None:
        return frozenset()
    try:
        numbers = jax.tree.leaves(pick(jax.tree.unflatten(tree, range(tree.num_leaves))))
    except (TypeError, LookupError, AttributeError) as error:
        raise DriverError(
            f"per_worker_state= fails on the state, {tree}, with {type(error).__name__}: {error}. It must return parts "
            f"of the state, such as  {_PICKED}"
        ) from error
    if not all(type(n) is int and 0 <= n < tree.num_leaves for n in numbers):
        raise DriverError(f"per_worker_state= must return parts of the state unchanged, such as  {_PICKED}")
    return frozenset(numbers)
