"""Step events, and the listeners that receive them.

    def watch(event):
        print(event.report.step, event.report.seconds, event.hooks[0].values)

    with program.subscribe(watch):
        ...

Events are local: each process calls its own listeners, and creates no event without a listener. A listener that raises
is disabled, with a warning in the log "adaptive" and a note in this process's report. The run continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from adaptive.base.activity import WorkerSeconds
from adaptive.base.decision import Limits
from adaptive.base.values.arrays import is_key
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.hooks import Hooks
from adaptive.control.membership import Membership, Numbers
from adaptive.control.requests import Request

from .report import Report

_log = logging.getLogger("adaptive")


@dataclass(frozen=True)
class HookValues:
    """The values that one hook received in a step.

    Attributes:
      name: the hook's name, after its index in the driver: "0/adapt_batch_size".
      every: the hook runs at each step whose number is a multiple of this.
      names: names of the leaves, such as "noise.scale", from the parameters of the function or of the policy.
      why: why the hook asked for nothing when it was due last; "" if it asked for something, or does not say it.

    All of them are replicated.
    """

    name: str
    every: int
    names: tuple[str, ...]
    _leaves: list[jax.Array] = field(repr=False)
    why: str = ""

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The leaves by name; empty if the step was skipped. The first access waits for the step and copies the leaves
        from the device. Replicated.
        """
        return {name: np.asarray(leaf) for name, leaf in zip(self.names, self._leaves, strict=False)}


def hook_values(hooks: Hooks, leaves: Sequence[list[jax.Array]]) -> tuple[HookValues, ...]:
    """Return the values of all hooks in a step, without leaves if the step was skipped."""
    named = zip(hooks.names, hooks.hooks, leaves or [[]] * len(hooks.names), hooks.why, strict=True)
    return tuple(HookValues(name, hook.every, hook.leaf_names, values, why) for name, hook, values, why in named)


class Asked(NamedTuple):
    """The targets before the hooks of a step ran, as the first hook observes them."""

    global_batch: int  # of the next step
    active: tuple[int, ...]  # the workers that are to process examples in the next step
    workers: Numbers

    @classmethod
    def so_far(cls, sizes: BatchSizes, membership: Membership) -> Asked:
        """Return the current targets."""
        bounds = sizes.bounds()
        total = bounds.nearest(sum(sizes.target))
        return cls(total, bounds.active, membership.numbers)


@dataclass(frozen=True)
class StepEvent:
    """One step, as a listener receives it.

    Attributes:
      report: the step's report, with decision, sizes, seconds and notes.
      epoch: epochs of data consumed, as a fraction. Replicated.
      previous_batch_sizes: batch sizes of the previous step, in which the seconds that hooks receive were measured.
        Replicated.
      limits: the limits of this step's sizes. Replicated.
      seed: the program's seed. Replicated.
      hooks: the values of each hook, in the order of the driver.
      asked: the targets when the hooks ran. Replicated.
      decided: names of the hooks that made the decision. Replicated.
      workers: seconds of every worker in this step; zeros if the step has no message. Replicated.
      requests: the requests of the script since the previous event, and those of hooks after this step, in order.
        Replicated.
      run_id: identifies the run: `program.run_id`. Replicated.
      restored: whether the program was restored since the previous step, so that steps run again. Replicated.
      at: when the step ended, in seconds since 1970, by this host's clock; 0 if unknown. Local.
      between: seconds between this step and the previous event, or the building of the program, by what was done:
        "script" (the script's own code), "evaluating", "saving", "restoring", and names of the breakdown. Local.
      origin: process, hosts, versions and settings; in the first event of a program only. Local.
      logged: what `program.log` and `program.evaluate(log=…)` added after this step, by name. Sinks get the step once
        more with it. Local.
    """

    report: Report
    epoch: float
    previous_batch_sizes: tuple[int, ...]
    limits: Limits
    seed: int
    hooks: tuple[HookValues, ...]
    asked: Asked
    decided: tuple[str, ...]
    workers: WorkerSeconds
    requests: tuple[Request, ...] = ()
    run_id: str = ""
    restored: bool = False
    at: float = 0.0
    between: Mapping[str, float] = field(default_factory=dict)
    origin: Mapping[str, Any] | None = None
    logged: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def scalars(self) -> dict[str, float]:
        """The driver's metrics that are single numbers, by name: "loss", "noise.scale"; of an object with `compute()`,
        as of flax, clu or metrax, the numbers that it returns. The first access waits for the step. Replicated.
        """
        return numbers_by_name(self.report.metrics)


def numbers_by_name(values: Any) -> dict[str, float]:
    """Return the single numbers of a pytree by name, "val.loss"; of an object with `compute()`, those it returns."""
    nodes, tree = jax.tree.flatten(values, is_leaf=_computes)
    found: dict[str, float] = {}
    for name, node in zip(_names(tree), nodes, strict=True):
        found.update(_computed(name, node) if _computes(node) else _number(name, node))
    return found


def _computes(node: Any) -> bool:
    """Return whether a metric is an object with `compute()`, such as `nnx.metrics.Accuracy`."""
    return not isinstance(node, type) and callable(getattr(node, "compute", None))


def _computed(name: str, metric: Any) -> dict[str, float]:
    """Return the numbers of `metric.compute()`, or the metric's own numbers if it cannot be computed on the host."""
    on_host = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), metric)
    try:
        with np.errstate(all="ignore"):  # without examples it is 0 / 0
            result = on_host.compute()
    except Exception:  # any library's metric may raise anything
        result = metric
    leaves, tree = jax.tree.flatten(result)
    numbers: dict[str, float] = {}
    for within, leaf in zip(_names(tree), leaves, strict=True):
        numbers.update(_number(".".join(filter(None, (name, within))), leaf))
    return numbers


def _number(name: str, x: Any) -> dict[str, float]:
    """Return a leaf by its name if it is a single real number."""
    if getattr(x, "ndim", 0) or is_key(x):
        return {}
    number = np.asarray(x).item()  # through numpy: `float` of a JAX array takes ten times as long
    return {name: float(number)} if isinstance(number, int | float) else {}


@lru_cache(maxsize=64)
def _names(tree: jax.tree_util.PyTreeDef) -> tuple[str, ...]:
    """Return the names of the leaves, such as "noise.scale"."""
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return tuple(keystr(path, simple=True, separator=".") for path, _ in paths)


Listener = Callable[[StepEvent], Any]
"""`listener(event)`, called after each step, in the training thread. Must not communicate with other processes."""


class Subscription(AbstractContextManager["Subscription"]):
    """A subscription of a listener; ends with `close()` or with its `with` block."""

    def __init__(self, listeners: Listeners, listener: Listener):
        self._listeners, self.listener = listeners, listener

    def close(self) -> None:
        """Stop calling the listener."""
        self._listeners.remove(self)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"listener {getattr(self.listener, '__name__', type(self.listener).__name__)!r}"


class Listeners:
    """The listeners of one program in this process. What a step asks are attributes, as each call in Python costs it.

    Attributes:
      any: whether there is a listener to call.
      waits: whether one of them is to see only steps that are known to be finite. Listeners with an attribute
        `reads_later` do not wait: they read values later, and receive a step that was not finite once more.
    """

    def __init__(self) -> None:
        self._all: tuple[Subscription, ...] = ()
        self._suspended = self.any = self.waits = False

    @property
    def suspended(self) -> bool:
        """Whether no listener is called."""
        return self._suspended

    @suspended.setter
    def suspended(self, suspended: bool) -> None:
        self._suspended = suspended
        self._set(self._all)

    def add(self, listener: Listener) -> Subscription:
        """Call a listener after each step from now on."""
        self._set((*self._all, Subscription(self, listener)))
        return self._all[-1]

    def remove(self, subscription: Subscription) -> None:
        """Do not call its listener any more."""
        self._set(tuple(other for other in self._all if other is not subscription))

    def _set(self, subscriptions: tuple[Subscription, ...]) -> None:
        self._all, self.any = subscriptions, bool(subscriptions) and not self._suspended
        self.waits = self.any and not all(getattr(each.listener, "reads_later", False) for each in subscriptions)

    def notify(self, event: StepEvent) -> list[str]:
        """Call all listeners. Returns notes on those that failed and are disabled."""
        notes = []
        for subscription in self._all:
            try:
                subscription.listener(event)
            except Exception as error:
                self.remove(subscription)
                notes.append(f"{subscription} failed, and is disabled: {error!r}")
                _log.warning("%s", notes[-1], exc_info=True)
        return notes
