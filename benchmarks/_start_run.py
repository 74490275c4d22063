"""One process of `start.py`: from the start of the interpreter to the end of the first step, by hand or as a driver.

    STARTED=seconds python benchmarks/_start_run.py (by-hand | driver) MODEL LOCAL_BATCH RANKS

`STARTED` is the launcher's `time.monotonic()`. Prints one line of JSON, the fields of `Start`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main(way: str, name: str, local_batch: int, ranks: int) -> None:
    marks = [(float(os.environ["STARTED"]), 0.0)]

    def mark() -> None:
        marks.append((time.monotonic(), time.process_time()))

    prepare = by_hand if way == "by-hand" else driver
    import jax

    programs: list[list[Any]] = []  # of each compiled program its name, and the seconds that the compiler took
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **about: (
            programs.append([about.get("fun_name"), seconds]) if event.endswith("/backend_compile_duration") else None
        )
    )
    import optax  # noqa: F401  # by either way

    from_model = prepare(ranks)
    mark()  # imports
    import _timed_models

    makers = {"conv net": _timed_models.conv_net, "perceptron": _timed_models.perceptron}
    makers |= {"attention": _timed_models.attention, "recurrent": _timed_models.recurrent}
    model = makers[name](name, local_batch)
    state = (model.params, jax.jit(_timed_models.OPTIMIZER.init)(model.params))
    jax.block_until_ready(state)
    programs.clear()
    mark()  # model and data
    first_step = from_model(model, state)
    mark()  # building
    first_step()
    mark()  # the first step
    seconds, cpu = ([b - a for a, b in itertools.pairwise(clock)] for clock in zip(*marks, strict=True))
    found = {"seconds": seconds, "cpu": cpu, "programs": list(programs)}
    print(json.dumps(found), flush=True)


def by_hand(ranks: int) -> Callable[[Any, Any], Callable[[], float]]:
    """Return the first step of a plain jitted loop: one program, or two with an Allreduce between them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    if ranks > 1:
        from mpi4py import MPI

    def made(model: Any, state: Any) -> Callable[[], float]:
        from _timed_models import N_EXAMPLES, OPTIMIZER

        order = np.random.default_rng(0).permutation(N_EXAMPLES)
        rank = MPI.COMM_WORLD.rank if ranks > 1 else 0
        rows = order[rank * model.local_batch : (rank + 1) * model.local_batch]
        batch = jax.tree.map(lambda a: a[rows], model.data)

        def updated(params: Any, opt_state: Any, grads: Any) -> Any:
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        if ranks == 1:

            def step(params: Any, opt_state: Any, batch: Any) -> Any:
                loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
                return *updated(params, opt_state, grads), loss

            jitted = jax.jit(step, donate_argnums=(0, 1))
            return lambda: float(jitted(*state, batch)[-1])

        from jax.flatten_util import ravel_pytree

        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), model.params)
        sizes = [int(np.prod(s.shape)) for s in jax.tree.leaves(shapes)]

        @jax.jit
        def gradient(params: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
            return jnp.concatenate([ravel_pytree(grads)[0], loss[None]])

        def update(params: Any, opt_state: Any, total: Any) -> Any:
            pieces = jnp.split(total[:-1] / ranks, np.cumsum(sizes)[:-1])
            leaves = [piece.reshape(s.shape) for piece, s in zip(pieces, jax.tree.leaves(shapes), strict=True)]
            grads = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
            return *updated(params, opt_state, grads), total[-1] / ranks

        jitted_update = jax.jit(update, donate_argnums=(0, 1))
        buffer = np.empty(sum(sizes) + 1, np.float32)

        def first_step() -> float:
            np.copyto(buffer, gradient(state[0], batch))
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
            return float(jitted_update(*state, buffer)[-1])

        return first_step

    return made


def driver(ranks: int) -> Callable[[Any, Any], Callable[[], float]]:
    """Return the first step of this library's program."""
    import adaptive as ad
    import collectives as comm
    import controllers  # noqa: F401  # as programs do
    import monitors  # noqa: F401

    world = comm.world().__enter__()
    assert world.size == ranks

    def made(model: Any, state: Any) -> Callable[[], float]:
        from _timed_models import OPTIMIZER
        from _training import driver_of

        step = driver_of(model.loss_fn, OPTIMIZER)
        program = ad.Program(step, state, model.data, global_batch=ranks * model.local_batch, world=world)
        return lambda: float(program.step().metrics["loss"])

    return made


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
