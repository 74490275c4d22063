"""Checks that all processes have built the same program, with the same data and JAX settings."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from adaptive.base.errors import DisagreementError
from adaptive.base.values.ambient import describe_settings
from adaptive.base.values.arrays import numbers_of
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.graph.text import EquationText, as_text

T = TypeVar("T")


def check_same_build(world: World, build_digests: dict[str, str], plan: Plan, about: str = "") -> None:
    """Compare the digests of the program's inputs (by name), the JAX settings, and the driver (its plan for the same
    number of examples), over all processes. Raises a DisagreementError on every process that names what differs.
    """
    if world.processes == 1:
        return
    # Settings come first: if one differs, other digests differ as a consequence.
    digests = {**describe_settings(), **build_digests, _DRIVER: digest_of_plan(plan)}
    everyone = _exchanged(world, about, digests)
    if _differing(everyone) == _DRIVER:  # the same on all processes
        compare(_exchanged(world, about, digests_of_lines(plan)))
    compare(everyone)


_DRIVER = "driver"
_VERSIONS = "versions"  # may differ; mentioned in errors, because they can explain other differences


def versions() -> str:
    """Return the versions of the libraries that results depend on. Local."""
    return f"jax {jax.__version__}, numpy {np.__version__}"


def _exchanged(world: World, about: str, digests: dict[str, str]) -> list[dict[str, str]]:
    own = json.dumps({**digests, _VERSIONS: versions()}).encode()
    return [json.loads(theirs) for theirs in world.all_gather_bytes(own, about)]


def _differing(everyone: Sequence[dict[str, str]]) -> str | None:
    names = dict.fromkeys(name for theirs in everyone for name in theirs if name != _VERSIONS)
    return next((n for n in sorted(names, key=_DRIVER.__eq__) if len({theirs.get(n) for theirs in everyone}) > 1), None)


def compare(everyone: Sequence[dict[str, str]], advice: str | None = None) -> None:
    """Compare the digests of all processes, by rank. `advice`: by default chosen by the digest's name.

    Raises:
      DisagreementError: a digest differs. The error names the first one, with each rank's value.
    """
    name = _differing(everyone)
    if name is None:
        return
    if advice is None:
        advice = next((text for start, text in _ADVICE.items() if name.startswith(start)), _ADVICE[""])
    others = [theirs.get(_VERSIONS, "") for theirs in everyone]
    if len(set(others)) > 1 and name.startswith(("driver", "state")):
        advice = f"The ranks run different versions, which may be why: {_by_rank(others)}.\n{advice}"
    shown = _by_rank([theirs.get(name, "none") for theirs in everyone])
    raise DisagreementError(f"{name} is not the same on all ranks: {shown}.\n{advice}")


def _by_rank(values: Sequence[str]) -> str:
    common = max(values, key=values.count)
    odd = [rank for rank, value in enumerate(values) if value != common]
    return "; ".join(f"rank {r}: {v}" for r, v in enumerate(values)) if len(values) <= 8 else f"ranks {odd} differ"


_ADVICE = {
    "jax_": "Every rank must compute alike: set it on all of them, before the program is built.",
    "driver": "Every rank must build the same program: no Python branch on the rank in the driver, and no number that "
    "differs between ranks (time, random values). A worker's number is ad.worker_index().",
    "data": "Every rank needs the whole data set, in the same order; the program gives each worker its share. To give "
    "each worker data of its own: ad.Shards([data_0, data_1, …]), all of them on every rank. If data[i] draws random "
    "numbers, draw them from the rng of  ad.data.from_source(data, random_map=fn)  instead.",
    "state": "Start from one seed on every rank, or from rank 0's:  state = comm.broadcast(state)",
    "": "Every rank must give Program the same arguments.",
}


def digest_of_tree(tree: Any) -> str:
    """Return a digest of the contents of all leaves."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(tree):
        array = numbers_of(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def digest_of_plan(plan: Plan) -> str:
    """Return a digest of all that a driver computes: operations, operands and constants."""
    text = repr((plan.signature, [line.text for line in _lines(plan)]))
    return f"{plan.graph.name}, {len(plan.graph.eqns)} equations, {digest_of_text(text)}"


_ENDS = "driver, in what it takes or returns,"


def digests_of_lines(plan: Plan) -> dict[str, str]:
    """Return a digest for each line of the driver, of the equations that come from it."""
    lines: dict[str, list[str]] = {}
    for line in _lines(plan):
        lines.setdefault(f"driver, at {line.where}," if line.where else _ENDS, []).append(line.text)
    found = {where: f"{len(texts)} equations, {digest_of_text(repr(texts))}" for where, texts in lines.items()}
    found[_ENDS] = found.pop(_ENDS)  # digests of lines come first, because they are more specific
    return found


def _lines(plan: Plan) -> Iterator[EquationText]:
    graph = plan.graph
    contents = {var: f"={digest_of_tree(value)}" for var, value in graph.consts.items()}
    return as_text([*graph.invars, *graph.consts], graph.eqns, graph.outvars, contents)


def digest_of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def compare_across_processes(world: World, about: str, digests: dict[str, str], result: T, advice: str) -> list[T]:
    """Return the results of all processes, by rank, if their digests (by name) are equal. Communicates. Raises a
    DisagreementError on every process if one differs, or if others are in another collective.
    """
    own = pickle.dumps((digests, pickle.dumps(result)))  # digests are compared before results are unpickled
    everyone = [pickle.loads(theirs) for theirs in world.all_gather_bytes(own, about)]
    compare([theirs for theirs, _ in everyone], advice)
    return [pickle.loads(theirs) for _, theirs in everyone]
