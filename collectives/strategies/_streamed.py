"""`streamed`: rounds in fragments, each of which is exchanged beside the next local steps."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import adaptive as ad
from adaptive.base.numbers import real, whole
from adaptive.operators.sources import EXAMPLES, read
from collectives._all_reduce import all_reduce
from collectives._coded import in_codes
from collectives._codes import codec_of
from collectives._leaves import error
from collectives._wire import Rounding, Wire

from ._diloco import inner_steps
from ._strategy import Stepped, Strategy, ValueAndGrad
from ._traffic import Traffic, all_reduce_message
from ._trees import arrays, check_optimizer, rounding_of, select


class Streamed(NamedTuple):
    """A model of fragments, each of which is that of its last exchange; and each worker's replica."""

    params: Any  # z. Replicated
    outer: Any  # the outer optimizer's state, of each fragment: a leading axis of fragments. Replicated
    taken: Any  # steps taken, int32. Replicated
    replica: Any  # x. Local
    inner: Any  # the inner optimizer's state. Local
    seen: Any  # steps of which `replica` is the result, int32. Local


def streamed(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    steps: int,
    fragments: int,
    *,
    overlap: bool = True,
    mixing: float = 0.5,
    wire: Wire | None = None,
    rounding: Rounding | None = None,
) -> Strategy:
    """Return the Streaming DiLoCo strategy: rounds whose exchange is cut into fragments, and hidden behind local steps.

    The parameters, as one vector, are cut into `fragments` equal parts. A step of the program is a part of a round: it
    has `steps / fragments` local steps, and exchanges one fragment, in turns:

        D_p = z_p - sum_i b_i x_ip / sum_i b_i
        z_p <- outer's update by D_p        x_ip <- mixing x_ip + (1 - mixing) z_p

    With `overlap`, D_p is of the replicas before the step's local steps, and is sent beside these; z_p and x_ip change
    after them. Without, D_p is of the replicas after them, and nothing is hidden; one fragment with `mixing=0` is then
    `diloco`. So a fragment is exchanged once in `steps` local steps, and a step sends the parameters' bytes divided by
    `fragments`.

    An exchange begins and ends within one step of the program. So nothing is on its way between two steps: a step in
    which a worker is lost is taken again, and workers join, batches change and checkpoints are written between steps,
    as with any strategy. A joining worker, or one that had no examples for a step, begins with z.

    Args:
      inner: an optax optimizer; its state is per worker.
      outer: an optax optimizer; its state is replicated. It is given a fragment as one vector.
      steps: local steps between two exchanges of the same fragment; a multiple of `fragments`.
      fragments: number of fragments.
      overlap: whether to exchange beside the local steps. What is hidden depends on the program's `overlap=`, which by
        default measures the link; the driver must also reduce something of the batch, such as the loss.
      mixing: the share of a replica's own parameters that it keeps in an exchange; at least 0 and below 1.
      wire: a format for D: `jnp.bfloat16`, "8bit", "4bit", "2bit" or `comm.top_k(64)`. See `collectives.all_reduce`.
      rounding: to that format; see `collectives.all_reduce`. By default "error_feedback" for compressed formats, which
        keeps the rounding error of each fragment until its next exchange, and "nearest" for others.

    Returns:
      A `Strategy`; its loss is the mean over the local steps. Its model is z.

    Raises:
      CollectiveError: an argument is not an optimizer or out of range, or `wire` or `rounding` is not supported; or,
        when the strategy is initialized, parameters are not real floats.

    Example:
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)                                # doctest: +SKIP
      >>> strategy = sync.streamed(optax.adamw(4e-4), outer, steps=40, fragments=4)          # doctest: +SKIP

    References:
      Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", section 2.
    """
    check_optimizer("streamed", inner, "inner")
    check_optimizer("streamed", outer, "outer")
    each = _steps_of_a_fragment(steps, fragments)
    keep = real(mixing)
    if keep is None or not 0 <= keep < 1:
        raise error("streamed", f"mixing={mixing!r} must be at least 0 and below 1.")
    how: dict[str, Any] = {"wire": wire, "rounding": _rounding(wire, rounding)}
    codec = codec_of(wire)

    def reduced(x: jax.Array, number: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """Return the mean over workers of fragment `number`."""
        if codec is None or how["rounding"] != "error_feedback":
            return all_reduce(x, weight=weight, **how)
        weight = read(EXAMPLES) if weight is None else weight
        return in_codes(codec, "error_feedback", x, {"": x}, weight, None, fragment=(fragments, number))

    def init(params: Any) -> Streamed:
        params, none = arrays(params), jnp.zeros((), jnp.int32)
        rows = _rows(params, fragments)
        return Streamed(params, jax.vmap(outer.init)(rows), none, params, inner.init(params), none)

    def take(state: Streamed, value_and_grad: ValueAndGrad, batch: Any) -> Stepped:
        is_current = state.seen == state.taken
        before, number = select(is_current, state.replica, state.params), ad.step() % fragments
        old = _rows(state.params, fragments)
        if overlap:
            # A replica that begins with z has nothing to tell; where all do, the mean is to be 0 and not 0 / 0.
            weight = jnp.where(is_current, read(EXAMPLES), 1e-20)
            change = reduced(old[number] - _rows(before, fragments)[number], number, weight)
        (replica, opt_state), losses = inner_steps(inner, each, before, state.inner, value_and_grad, batch)
        new = _rows(replica, fragments)
        if not overlap:
            change = reduced(old[number] - new[number], number)
        updates, outer_state = outer.update(change, jax.tree.map(lambda x: x[number], state.outer), old[number])
        agreed = optax.apply_updates(old[number], updates)
        mixed = agreed if not keep else keep * new[number] + (1 - keep) * agreed
        if overlap:  # before the first step there is nothing to exchange
            mixed = jnp.where(state.taken > 0, mixed, new[number])
        rows = _trees((old.at[number].set(agreed), new.at[number].set(mixed)), state.params)
        outer_state = jax.tree.map(lambda all_, one: all_.at[number].set(one), state.outer, outer_state)
        taken = state.taken + 1
        new_state = Streamed(rows[0], outer_state, taken, rows[1], opt_state, taken)
        return new_state, jax.tree.map(lambda x: x.mean(0), losses), None, None

    return Strategy(
        "streamed",
        init,
        take,
        per_worker_state=lambda state: (state.replica, state.inner, state.seen),
        model=lambda state: state.params,
        kind=Streamed,
        traffic=lambda: Traffic((all_reduce_message(**how, of=fragments, beside=overlap),), local_steps=each),
    )


def _steps_of_a_fragment(steps: Any, fragments: Any) -> int:
    for name, value in (("steps", steps), ("fragments", fragments)):
        if whole(value) is None or value < 1:
            raise error("streamed", f"{name}={value!r} must be a positive integer.")
    if steps % fragments:
        raise error("streamed", f"steps={steps} must be a multiple of fragments={fragments}.")
    return steps // fragments


def _rounding(wire: Any, rounding: Any) -> Rounding:
    if rounding == "error_feedback" and codec_of(wire) is None:
        raise error("streamed", 'rounding="error_feedback" is for compressed formats, such as  wire="4bit"')
    return rounding_of("streamed", wire, rounding)


def _rows(tree: Any, fragments: int) -> jax.Array:
    """Return a tree's fragments, the last one filled up with zeros; shape=(fragments, elements).

    Raises:
      CollectiveError: a leaf is not of real floats.
    """
    leaves = jax.tree.leaves(tree)
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        dtypes = sorted({str(leaf.dtype) for leaf in leaves})
        raise error("streamed", f"parameters must be real floats to be cut into fragments, not {', '.join(dtypes)}.")
    dtype = max((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.itemsize)
    vector = jnp.concatenate([leaf.astype(dtype).reshape(-1) for leaf in leaves])
    return jnp.pad(vector, (0, -vector.size % fragments)).reshape(fragments, -1)


def _trees(rows: tuple[jax.Array, ...], like: Any) -> list[Any]:
    """Return what `_rows` was given, with the shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    ends = list(accumulate((leaf.size for leaf in leaves), initial=0))

    def one(vector: jax.Array) -> Any:
        parts = [
            vector[start:stop].reshape(leaf.shape).astype(leaf.dtype)
            for (start, stop), leaf in zip(pairwise(ends), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, parts)

    return [one(found.reshape(-1)) for found in rows]
