"""`local_steps`: rounds of local steps, after which the models are averaged."""

from __future__ import annotations

from collections.abc import Iterable

import optax

from collectives.compression._wire import Rounding, Wire

from ._diloco import rounds
from ._strategy import Strategy
from ._trees import check_optimizer


def local_steps(
    optimizer: optax.GradientTransformation,
    steps: int,
    *,
    wire: Wire | None = None,
    rounding: Rounding | None = None,
    hosts: Iterable[Iterable[int]] | None = None,
) -> Strategy:
    """Return the local SGD strategy: each worker takes `steps` local steps, then models are averaged.

    A round is one step of the program (see docs/federated.md). It sends the parameters' bytes once. Workers are
    weighted by their examples. The model is replicated between rounds. Local batches are multiples of `steps`. With
    steps=1 and SGD this is synchronous SGD.

    Args:
      optimizer: an optax optimizer; its state is per worker and kept from round to round.
      steps: local steps in a round.
      wire: a number format for the change of the model in a round: `jnp.bfloat16`, "4bit". See `diloco`.
      rounding: how to round to `wire`. See `diloco`.
      hosts: the workers of each host, for compressed formats. See `diloco`.

    Returns:
      A `Strategy`; its loss is the mean over the round's steps.

    Raises:
      CollectiveError: `optimizer` is not an optimizer, `steps` is not a positive integer, or `wire` or `rounding`
        is not supported. An invalid `hosts` raises when the driver is traced.

    Example:
      >>> strategy = sync.local_steps(optax.sgd(0.1), steps=8)            # doctest: +SKIP

    References:
      Stich 2019, "Local SGD converges fast and communicates little", ICLR, algorithm 1.
      McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", algorithm 1.
    """
    check_optimizer("local_steps", optimizer)
    return rounds("local_steps", optimizer, optax.sgd(1.0), steps, wire, rounding, hosts)
