"""What type checkers know of a program: `make types` checks this module, and no test runs it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict, assert_type

import jax
import numpy as np

import adaptive as ad


class State(NamedTuple):
    weights: jax.Array


class Metrics(TypedDict):
    loss: jax.Array


Batch = dict[str, jax.Array]


def driver(state: State, batch: Batch) -> tuple[State, Metrics]:
    return state, {"loss": batch["x"].mean()}


def without_types(state, batch):
    return state, {}


def a_program_has_the_types_of_its_driver(batch: Batch) -> None:
    with ad.Program(driver, State(np.zeros(3)), batch, global_batch=8) as program:  # type: ignore[arg-type]  # numpy
        assert_type(program, ad.Program[State, Metrics])
        assert_type(program.state, State)
        assert_type(program.step().metrics, Metrics)
        for report in program.run(steps=3):
            assert_type(report.metrics["loss"], jax.Array)
            _ = report.metrics["los"]  # type: ignore[typeddict-item]
    _ = program.state.weight  # type: ignore[attr-defined]


def a_driver_without_types_has_any(batch: Batch) -> None:
    program = ad.Program(without_types, {"weights": np.zeros(3)}, batch, global_batch=8)
    assert_type(program.state, Any)
    assert_type(program.step().metrics, Any)
