"""What a program takes of a source: which examples, how often, and whether their bits are right."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from tests.sources.rows import Row, like

GLOBAL_BATCH = 5  # of 24 examples: steps span the ends of epochs


def ids(tree: Any, examples: Any) -> Any:
    """What tells examples apart: the leaf of integers, or else the first element of the first leaf. shape=(n,)."""
    tables = jax.tree.leaves(examples)
    which = next((k for k, table in enumerate(tables) if table.ndim == 1 and table.dtype.kind == "i"), 0)
    leaf = jax.tree.leaves(tree)[which]
    return leaf.reshape(leaf.shape[0], -1)[:, 0]


def numbers_of(batch: Any, examples: Any) -> jax.Array:
    """Which examples a batch holds. shape=(batch size,)."""
    known = jnp.asarray(ids(examples, examples))
    return jnp.argmax(ids(batch, examples)[:, None] == known[None, :], axis=1)


def bits(leaf: jax.Array) -> jax.Array:
    """The sum of an array's bits as integers, modulo 2**32, which does not depend on the order."""
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32).sum()


def driver_of(row: Row) -> Any:
    """A driver that counts the examples of a row, and compares each with what it must be."""

    def driver(state, batch):
        found = jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), batch)
        wanted = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), like(row.examples))
        assert found == wanted, f"{row.data} gave {found} instead of {wanted}"
        numbers, wrong = numbers_of(batch, row.examples), jnp.int32(0)
        for leaf, table in zip(jax.tree.leaves(batch), jax.tree.leaves(row.examples), strict=True):
            if not isinstance(table, jax.ShapeDtypeStruct):
                wrong += (leaf != jnp.asarray(table)[numbers]).sum()
        metrics = {
            "taken": comm.all_reduce(jnp.zeros(row.length, jnp.int32).at[numbers].add(1), op="sum"),
            "wrong": comm.all_reduce(wrong, op="sum"),
            "bits": comm.all_reduce(sum(map(bits, jax.tree.leaves(batch)), jnp.uint32(0)), op="sum"),
        }
        return {"taken": state["taken"] + metrics["taken"]}, metrics

    return driver


def program_of(row: Row, data: Any, **options: Any) -> ad.Program:
    """A program that takes this row's data."""
    state = {"taken": jnp.zeros(row.length, jnp.int32)}
    return ad.Program(driver_of(row), state, data, **{"global_batch": GLOBAL_BATCH, "seed": 3, **options})


def check(row: Row, program: ad.Program, report: ad.Report, *, once: bool = True) -> list[int]:
    """Check a step. Returns what a restored program must repeat.

    Args:
      once: whether all workers share one data set, so that each example comes once per epoch.
    """
    assert not report.metrics["wrong"], report
    assert int(np.sum(report.metrics["taken"])) == report.global_batch, report
    if once:
        taken = np.asarray(program.state["taken"])
        whole, part = divmod(report.examples, row.length)
        assert taken.sum() == report.examples, (report, taken)
        assert taken.min() == whole, (report, taken)
        assert taken.max() == whole + (part > 0), (report, taken)
    return [*np.asarray(report.metrics["taken"]).tolist(), int(report.metrics["bits"])]
