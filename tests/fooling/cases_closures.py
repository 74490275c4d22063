"""Hooks and callbacks that read the size of a microbatch, in many guises, and others that may not be refused."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np

import adaptive as ad
import controllers as ctrl

from .cases import mean_gradient, plain, refused, right, step

READS = "closes over it"


def ask(control, size):
    """A hook would set the learning rate by this."""
    control.stop() if size < 0 else None


def trained(state, batch, hook):
    """A step, with a hook."""
    gradient = mean_gradient(state, batch)
    ctrl.hook(hook, gradient[0], name="grow")
    return step(state, gradient), {}


# --- what a trace makes -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sizes:
    n: int


@refused(ad.DriverError, "cannot be compared between two traces: made, which <lambda>() closes over", "Create it once")
def a_length_in_an_object(state, batch):
    made = Sizes(len(batch["y"]))
    return trained(state, batch, lambda control, value: ask(control, made.n))


@refused(ad.DriverError, READS, "an argument of functools.partial")
def a_length_as_an_argument_of_a_partial(state, batch):
    def grow(size, control, value):
        ask(control, len(size))

    return trained(state, batch, functools.partial(grow, range(len(batch["y"]))))


@refused(ad.DriverError, READS, "n, a default argument of grow()")
def a_length_as_a_default_argument(state, batch):
    def grow(control, value, n=(len(batch["y"]),)):  # noqa: B008
        ask(control, n[0])

    return trained(state, batch, grow)


@refused(ad.DriverError, READS, "sizes, which inner() closes over")
def a_length_in_a_closure_of_a_closure(state, batch):
    sizes = [None] * len(batch["y"])

    def inner():
        return len(sizes)

    def outer():
        return inner()

    return trained(state, batch, lambda control, value: ask(control, outer()))


@refused(ad.DriverError, READS, "code of")
def another_function_for_some_lengths(state, batch):
    functions = (
        lambda control, value: ask(control, 1),
        lambda control, value: ask(control, 2),
        lambda control, value: ask(control, 3),
    )
    return trained(state, batch, functions[len(batch["y"]) % 3])


@refused(ad.DriverError, READS, "sizes")
def a_length_in_a_callback_within_a_loop(state, batch):
    sizes, one = bytes(len(batch["y"])), jax.ShapeDtypeStruct((), np.float32)
    gradient = mean_gradient(state, batch)

    def body(carry, _):
        return carry * jax.pure_callback(lambda c: np.float32(len(sizes)), one, carry), None

    rate = ad.replicated(jax.lax.scan(body, gradient[0], None, length=2)[0])
    return step(state, rate * gradient), {}


# --- what a trace writes to -------------------------------------------------------------------------------------------


class Trainer:
    """A driver that is a method, as trainers have it."""

    n, __name__ = 0, "a_length_in_an_attribute_of_a_trainer"

    def __call__(self, state, batch):
        self.n = len(batch["y"])
        return trained(state, batch, self.by_attribute)

    def by_attribute(self, control, value):
        ask(control, self.n)


refused(ad.DriverError, READS, "self.n of by_attribute()")(Trainer())

# --- what is the same for both ----------------------------------------------------------------------------------------

SEEN: dict[int, int] = {}


@right(plain())
def a_hook_with_what_a_driver_makes(state, batch):
    """Functions are compared by what they capture, other objects by their own equality."""
    table, rate, model = {"a": [1, (2.0, {"b"})]}, jax.jit(lambda x: 2 * x), nn.Dense(3)
    sizes, helper = Sizes(3), lambda: len(table)

    def grow(control, value, more=np.arange(3)):  # noqa: B008
        ask(control, model.features + helper() + more[0] + float(rate(1.0)) + sizes.n)

    return trained(state, batch, grow)


@right(plain())
def a_memory_by_length_that_a_hook_reads(state, batch):
    """It grows with the first traces, and is the same from then on."""
    seen = SEEN
    seen[len(batch["y"])] = 1
    return trained(state, batch, lambda control, value: ask(control, len(seen)))


@right(plain())
def a_callback_that_is_given_examples(state, batch):
    """It belongs to a microbatch, and may know its size."""
    n = len(batch["y"])
    jax.debug.callback(lambda y: ask(None, n), batch["y"][0])
    return step(state, mean_gradient(state, batch)), {}
