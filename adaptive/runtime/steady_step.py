"""The common step with the least Python: one worker in this process, and messages of one level.

`general_step.py` runs any step. Most steps need little of it, and short steps spend most of their time in Python. So
data that consecutive steps share are prepared when they change. Both kinds of step give bitwise equal results
(tests/adaptive/runtime/test_steady_step.py). Some loops here are not comprehensions, because up to Python 3.11 a
comprehension is a call.
"""

# ruff: noqa: PERF401

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.activity import COMPUTING, EXCHANGING
from adaptive.base.channel import SentMessage
from adaptive.data.stream import Share
from adaptive.graph.plan import Plan
from adaptive.operators import sources
from adaptive.operators.sources import Reading

from .autopsy import FailedStep, give_up
from .copied_examples import CopiedExamples
from .kernels.choice import Choice
from .kernels.memory_bound import ran_out_of_memory
from .memory import has_room
from .microbatches import Microbatches
from .out_of_memory import check_update
from .outcome import Outcome
from .segment_io import bytes_per_execution
from .step_plan import StepContext


def is_flat(plan: Plan, workers: int) -> bool:
    """Return whether `SteadyStep` can run the steps of a plan, with this number of workers of this process."""
    return (
        workers == 1
        and plan.levels == 1
        and list(plan.microbatches) == [0]
        and not plan.prologues
        and all(message.gate is None for message in plan.messages)
        and sum(message.travels for message in plan.messages) <= 1
    )


class _Microbatch(NamedTuple):
    """One microbatch of the worker."""

    run: Callable[[dict[str, Any]], dict[str, Any]]
    examples: int
    rows: slice | None  # rows of the worker's batch; `None`: all
    consts: list[Any]


Vectors = Sequence[Any]  # of sources: floats, and integers

_FIXED = {source.name for source in sources.FIXED}
_STEADY = slice(Reading._fields.index("seed"), Reading._fields.index("offset") + 1)  # the fields that those read
# Sources whose values for the next step's microbatches are known before it begins.
_KNOWN_AHEAD = {*_FIXED, "step", "compute_seconds"}


class _Ahead(NamedTuple):
    """Kernels of the next step that are already dispatched, and their inputs."""

    step: int
    sizes: Microbatches
    batch: Any
    state: list[jax.Array]
    op_states: list[list[jax.Array]]
    packed: list[jax.Array]
    kept: list[jax.Array]
    dispatched: float  # by `time.perf_counter`
    finite: jax.Array | None  # the result of the check of the message, if it is dispatched too


class SteadyStep:
    """Runs steps of one worker whose messages all have one level and are sent in every step.

    Args:
      ctx: the parts that the engine's steps share; its plan must satisfy `is_flat`.

    Attributes:
      copied: the next step's examples on an accelerator.
    """

    def __init__(self, ctx: StepContext):
        steps, plan, found = ctx.step_plan, ctx.step_plan.plan, ctx.step_plan.results
        call, final = plan.microbatches[0], plan.final
        self._ctx, self._steps = ctx, steps
        self._microbatch_state, self._microbatch_op_states = call.reads("state"), call.wiring["op_state"]
        self._batch = call.reads("batch")
        self._changed = plan.changed_state
        self._overwritten, self._read_only = found.overwritten, found.read_only
        self._final_op_states, self._final_kept = final.wiring["op_state"], [i for _, i in final.wiring["microbatch"]]
        self._final_messages = final.read_messages
        self._final_consts = ctx.consts["final", final.level, 0]
        # At most one message is sent in every step, because all contributions of a level are sent together.
        self._sent = next((n for n, message in enumerate(plan.messages) if message.travels), -1)
        self._stay = [n for n, message in enumerate(plan.messages) if not message.travels]
        self._dtype = steps.layouts[self._sent].parts[0].dtype if self._sent >= 0 else np.dtype(np.float32)
        self._bytes = steps.layouts[self._sent].nbytes if self._sent >= 0 else 0
        self._check = steps.finite_checks[self._sent] if steps.finite_checks and self._sent >= 0 else None
        self._on_host = ctx.world.devices[0].platform == "cpu"
        # Where the device checks the message, that is dispatched with the kernels, unless an exchange is awaited first.
        self._checks_own = self._check is not None and not self._on_host and ctx.world.capacity == 1
        self._leaves: Callable[[Any], list[Any]] | None = None  # of a batch
        self._microbatches: tuple[Microbatches, list[_Microbatch]] = (), []
        # On CPUs this gains nothing, because Python and the kernels share the cores.
        self.runs_ahead = not self._on_host and set(call.reads("source")) <= _KNOWN_AHEAD
        self._ahead: _Ahead | None = None
        self.copied = CopiedExamples(ctx.world.devices[0], self._batch)
        self._microbatch_bytes = bytes_per_execution(plan, steps.layouts)
        # Sources that change from step to step: (vector, index, function that reads the value).
        self._changing = [
            (vector, place, source.read)
            for vector, (sources, start) in enumerate(((steps.feed.floats, 1), (steps.feed.ints, 0)))
            for place, source in enumerate(sources, start)
            if source.name not in _FIXED
        ]
        self._final_is_fed_alike = set(final.reads("source")) <= _FIXED
        # (Microbatches, values that the other elements depend on, sizes, host vectors, device vectors.)
        self._same_vectors: tuple[Microbatches, tuple[Any, ...], Any, Vectors, Vectors] | None = None

    def fits(self, choice: Choice) -> bool:
        """Return whether this object can run a step of these microbatches; otherwise run a general one."""
        calls = choice.microbatches
        if not calls or self._ctx.workers.present != [0]:
            return False
        return len(calls) == 1 or not self._final_kept

    def __call__(
        self,
        share: Share,
        reading: Reading,
        choice: Choice,
        prefetch: Callable[[Sequence[int]], None],
        search: bool,
        more: str,
        began: float,
        input_seconds: float,
    ) -> Outcome:
        """Compute, exchange, and commit, like `Engine.step`, for the only worker of this process.

        Args:
          share, reading, choice: the step's examples, values of sources, and microbatches.
          prefetch: starts to fetch the examples of a next step with these sizes.
          search, more: see `Engine.step`.
          began: start of the step, by `time.perf_counter`.
          input_seconds: time for which the step waited for its examples.
        """
        ctx, steps, sizes = self._ctx, self._steps, choice.microbatches
        activity = ctx.activity
        activity.now = COMPUTING
        started = dispatched = time.perf_counter()
        vectors, final_vectors = self._vectors(reading, sizes)
        known = float("inf")
        ahead = None if self._ahead is None else self._take_ahead(reading.step, sizes, share.batches[0])
        if ahead is None:
            there = None if self.copied.last is None else self.copied.leaves_of(share.batches[0], sizes)
            leaves = there or (self._leaves or self._find_leaves)(share.batches[0])
            packed, kept = self.compute(sizes, reading, vectors, leaves)
            finite = self._check_own(packed) if self._checks_own else None
        else:
            packed, kept, finite, dispatched = ahead.packed, ahead.kept, ahead.finite, ahead.dispatched
            if packed[0].is_ready() and reading.compute_seconds == reading.compute_seconds:  # type: ignore[attr-defined]
                known = reading.compute_seconds  # the end was not observed; the previous step's time is an upper bound
        prefetch(share.sizes)
        packed[0].block_until_ready()
        seconds = min(known, time.perf_counter() - dispatched)
        for result in ctx.workers.committed:  # the previous step must have finished reading the receive buffers
            result.block_until_ready()
        messages: dict[int, Any] = {}
        for number in self._stay:
            messages[number] = [packed[steps.part_slices[number]]]
        sent = exchanged = time.perf_counter()
        if self._sent >= 0:
            own = ctx.status.encode_one(input_seconds, seconds, activity.busy(sent)).astype(self._dtype)
            activity.now = EXCHANGING
            results, heard = self._exchange(packed[steps.part_slices[self._sent]], own, reading.step + 1, more)
            exchanged = time.perf_counter()
            activity.now = COMPUTING
            ctx.status.decode(heard)
            if self._check is not None and not (self._check.passes(results[0]) if finite is None else bool(finite)):
                activity.took(began, (input_seconds, sent - started, exchanged - sent), exchanged)
                failed = FailedStep(share, (reading,), (sizes,), [packed], messages, (self._sent,), [seconds])
                return give_up(ctx, failed, self._sent, results[0], search=search)
            messages[self._sent] = results
        del packed, ahead  # frees the sent parts before the new state is computed
        outputs = self._commit(final_vectors, kept, messages)
        ended = time.perf_counter()
        activity.took(began, (input_seconds, ended - exchanged + sent - started, exchanged - sent), ended)
        hooks, found = [], steps.results
        for place in found.hooks:
            hooks.append(outputs[place])
        metrics = outputs[found.metrics]
        return Outcome(hooks, metrics, messages, [seconds], [sizes], int(self._sent >= 0), self._bytes)

    def dispatch_ahead(self, share: Share, reading: Reading, sizes: Microbatches) -> None:
        """Dispatch the kernels of the next step, which depend on the committed state only: the device computes during
        the report of this step and the user's code.

        Args:
          share, reading, sizes: those expected for the next step. If they differ, the work is discarded and repeated.
        """
        batch, dispatched = share.batches[0], time.perf_counter()
        try:
            leaves = self.copied.leaves_of(batch, sizes) or (self._leaves or self._find_leaves)(batch)
            packed, kept = self.compute(sizes, reading, self._vectors(reading, sizes)[0], leaves)
            finite = self._check_own(packed) if self._checks_own else None
        except jax.errors.JaxRuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            self.runs_ahead = False  # the next step computes them itself, with less in memory
            return
        state, op_states = list(self._ctx.workers.local_states[0]), list(self._ctx.workers.local_op_states[0])
        self._ahead = _Ahead(reading.step, sizes, batch, state, op_states, packed, kept, dispatched, finite)

    def forget_ahead(self) -> None:
        """Discard the kernels that were dispatched ahead, and the examples that were copied."""
        self._ahead = self.copied.last = None

    def _take_ahead(self, step: int, sizes: Microbatches, batch: Any) -> _Ahead | None:
        """Return the kernels that were dispatched ahead for this step; `None` if an input has changed since."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or (ahead.step, ahead.sizes) != (step, sizes) or ahead.batch is not batch:
            return None
        state, op_states = self._ctx.workers.local_states[0], self._ctx.workers.local_op_states[0]
        alike = all(map(is_, ahead.state, state)) and all(map(is_, ahead.op_states, op_states))
        return ahead if alike else None

    def _check_own(self, packed: list[jax.Array]) -> jax.Array:
        """Dispatch the check of the message, if this is the only worker, whose message no exchange changes. The result
        is on the host soon after the kernels end.
        """
        assert self._check is not None, "there is a check"
        return self._check.dispatch(packed[self._steps.part_slices[self._sent]])

    def _exchange(
        self, parts: Sequence[jax.Array], own: np.ndarray, step: int, more: str
    ) -> tuple[list[list[jax.Array]], np.ndarray]:
        """Reduce the message over all workers, with the status, to which this process adds `own`."""
        ctx, number = self._ctx, self._sent
        about = f"message {number + 1} of step {step} of {self._steps.name}"  # `StepPlan.about`, without its call
        rows = [parts] if not ctx.world.unowned_slots else ctx.neutral.with_gaps(number, [parts])
        ctx.activity.message = number
        return ctx.channels[number].exchange(SentMessage(rows, own, about, more, step))

    def _vectors(self, reading: Reading, sizes: Microbatches) -> tuple[Vectors, Vectors]:
        """Return the vectors of sources for the kernel and for the final segment.

        Vectors that have not changed since the previous step are already on the device.
        """
        same, read = self._same_vectors, tuple(reading)[_STEADY]
        if same is None or same[0] is not sizes or same[1] != read or same[2] is not reading.taking_part:
            host = self._steps.feed.measure_step(reading, len(sizes))
            if len(sizes) > 1:
                return host, host
            on_device = jax.device_put(host, self._ctx.world.devices[0])
            self._same_vectors = same = sizes, read, reading.taking_part, host, on_device
        measured, there = same[3:]
        if not self._changing:
            return there, there
        vectors = list(there)
        for vector, place, value in self._changing:
            if vectors[vector] is there[vector]:
                vectors[vector] = measured[vector].copy()  # a kernel may still read the old one
            vectors[vector][place] = value(reading)
        return vectors, there if self._final_is_fed_alike else vectors

    def _find_leaves(self, batch: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(batch)
        self._leaves = tree.flatten_up_to  # for later batches of this structure, without a Python call
        return leaves

    def _planned(self, microbatches: Microbatches) -> list[_Microbatch]:
        """Return the kernels and rows of these microbatches. Computed again when the microbatches change."""
        kernels, calls, start, nbytes = self._ctx.kernels, list[_Microbatch](), 0, 0
        for size in microbatches:
            kernel, rows = kernels.kernel(0, size, 0), slice(start, start + size)
            nbytes = max(nbytes, kernel.batch_bytes)
            calls.append(_Microbatch(kernel.run, size, None if len(microbatches) == 1 else rows, list(kernel.consts)))
            start += size
        self._microbatches = microbatches, calls
        self.runs_ahead = self.runs_ahead and has_room(self._ctx.world.devices[0], self._microbatch_bytes + nbytes)
        self.copied.wanted = self.runs_ahead and len(microbatches) == 1
        return calls

    def compute(
        self, sizes: Microbatches, reading: Reading, vectors: Vectors, leaves: list[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Dispatch the kernels. Returns the parts of all messages, summed over microbatches, and the last kernel's
        outputs.
        """
        ctx, state, op_states = self._ctx, self._ctx.workers.local_states[0], self._ctx.workers.local_op_states[0]
        calls = self._microbatches[1] if self._microbatches[0] is sizes else self._planned(sizes)
        batch = list(map(leaves.__getitem__, self._batch))
        given: dict[str, Any] = {
            "state": list(map(state.__getitem__, self._microbatch_state)),
            "op_state": self._microbatch_op_states and [op_states[k][leaf] for k, leaf in self._microbatch_op_states],
            "prologue": [],
            "microbatch": [],
            "message": [],
        }
        packed: list[jax.Array] = []
        for call in calls:
            given["const"] = call.consts
            if call.rows is None:
                given["batch"], (given["floats"], given["ints"]) = batch, vectors
            else:
                given["batch"] = [leaf[call.rows] for leaf in batch]
                of_microbatch = self._steps.feed.for_microbatch(vectors, reading, call.rows.start, call.examples)
                given["floats"], given["ints"] = of_microbatch
            out = call.run(given)
            new = out.pop("parts")
            packed = ctx.programs["add", 0, 0](packed, new) if packed else new
            del new  # so that the next microbatch's parts can reuse that memory
        return packed, out["outputs"]

    def _commit(self, vectors: Vectors, kept: Sequence[jax.Array], messages: dict[int, Any]) -> Any:
        """Run the final segment, whose results become the worker's state. Returns them."""
        ctx, workers = self._ctx, self._ctx.workers
        state, op_states, received = workers.local_states[0], workers.local_op_states[0], []
        for number in self._final_messages:
            received.append(messages[number][0])
        given_up = (
            list(map(state.__getitem__, self._overwritten)),
            self._final_op_states and [op_states[k][leaf] for k, leaf in self._final_op_states],
        )
        given: dict[str, Any] = {
            "state": list(map(state.__getitem__, self._read_only)),
            "microbatch": list(map(kept.__getitem__, self._final_kept)),
            "message": received,
            "const": self._final_consts,
            "floats": vectors[0],
            "ints": vectors[1],
            "prologue": [],
            "op_state": [],
            "batch": [],
        }
        try:
            outputs = ctx.programs["final", 0, 0](given_up, given)
        except jax.errors.JaxRuntimeError as error:
            check_update(error)
            raise
        workers.committed = outputs[:1]
        for i, new in zip(self._changed, outputs, strict=False):  # the state's outputs come first
            state[i] = new
        new_op_states = self._steps.results.op_states
        workers.local_op_states[0] = [outputs[place] for place in new_op_states] if new_op_states else []
        return outputs
