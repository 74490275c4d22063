"""One step in its general form: any number of workers, microbatches and levels of messages.

Segments and messages run in the order of the plan. A step commits completely or not at all: the final segment, which
reuses the memory of the old state, starts after all messages of the step have arrived and are finite.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.activity import COMPUTING, EXCHANGING, OTHER
from adaptive.base.channel import Arrived, Parts, SentMessage
from adaptive.data.stream import Share
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Segment
from adaptive.operators.sources import Reading

from .autopsy import FailedStep, give_up
from .microbatches import Microbatches
from .out_of_memory import check_update
from .outcome import Outcome
from .step_plan import Prefetch, StepContext

_NO_STATUS = np.zeros(0)


class GeneralStep:
    """One step: its inputs, and the values that its segments pass to later ones. One instance per step.

    Args:
      share: the batches of this process's workers.
      readings: the values of sources, by local index.
      microbatches: the sizes of each worker's microbatches, by local index; none for a worker without examples.
    """

    def __init__(
        self, ctx: StepContext, share: Share, readings: Sequence[Reading], microbatches: Sequence[Microbatches]
    ):
        self._ctx, self._steps, self._plan, self._share = ctx, ctx.step_plan, ctx.step_plan.plan, share
        self._readings, self._microbatches = readings, list(microbatches)
        self._all_local = range(len(readings))
        self._vectors = {
            i: self._steps.feed.measure_step(readings[i], len(self._microbatches[i])) for i in ctx.workers.present
        }
        self._messages: dict[int, list[list[jax.Array]]] = {}  # the reduced parts, by message and local index
        self._sent: list[int] = []  # numbers of messages
        self._prologue_outputs: dict[int, dict[int, Any]] = {}  # by level and local index
        self._kernel_outputs: dict[int, dict[int, list[Any]]] = {}  # by level and local index; per microbatch
        self._packed: list[list[jax.Array]] = [[] for _ in readings]  # parts of the current level's messages
        self._seconds = [0.0 if p else float("nan") for p in self._microbatches]
        self._started = 0.0

    def run(self, prefetch: Prefetch, *, more: str, search: bool, status_taken: bool) -> Outcome:
        """Compute, exchange, and commit.

        Args:
          prefetch: starts to fetch the next step's examples; called once, when the first kernels are dispatched.
          more: added to the error if processes are in different collectives.
          search: whether to determine where values that are not finite were computed.
          status_taken: whether the status of this step was decoded before.
        """
        for level in range(self._plan.levels + 1):
            self._run_prologue(level)
            self._run_kernels(level)
            if level == 0:
                prefetch(self._share.sizes)
            if level == self._plan.levels:
                break
            failed = self._exchange(level, more, status_taken=status_taken)
            if failed is not None:
                return self._give_up(*failed, search=search)
        hooks, metrics = self.commit()
        self._ctx.activity.turn(OTHER)
        return Outcome(hooks, metrics, self._messages, self._seconds, self._microbatches, *self._n_sent())

    # --- computing ----------------------------------------------------------------------------------------------------

    def _given(self, local_index: int, segment: Segment, microbatch: int = 0) -> dict[str, Any]:
        """Return a segment's inputs, except the vectors of sources, the constants and the batch."""
        workers, inputs = self._ctx.workers, self._steps.inputs[segment.kind, segment.level]
        given = inputs.of_state(workers.states[local_index], workers.op_states[local_index])
        if inputs.in_step:
            given["prologue"] = [self._prologue_outputs[level][local_index][i] for level, i in inputs.prologue]
            given["microbatch"] = [
                self._kernel_outputs[level][local_index][microbatch][i] for level, i in inputs.microbatch
            ]
            given["message"] = [self._messages[number][local_index] for number in inputs.messages]
        return given

    def _whole(self, local_index: int, segment: Segment) -> dict[str, Any]:
        """Return all inputs of a segment that does not read the batch."""
        given = self._given(local_index, segment)
        given["floats"], given["ints"] = self._vectors[local_index]
        given["const"] = self._ctx.consts[segment.kind, segment.level, local_index]
        given["batch"] = []
        return given

    def _run_prologue(self, level: int) -> None:
        segment = self._plan.prologues.get(level)
        if segment is None:
            return
        self._started = time.perf_counter()
        self._prologue_outputs[level] = {}
        for local_index in self._ctx.workers.present:
            given, began = self._whole(local_index, segment), time.perf_counter()
            out = self._ctx.programs["prologue", level, local_index](given)
            self._trace(local_index, f"once, before message {level + 1}", began, out)
            self._prologue_outputs[level][local_index] = out["outputs"]
            if "parts" in out:
                self._packed[local_index] = out["parts"]

    def _trace(self, local_index: int, name: str, began: float, results: Any, **details: Any) -> None:
        """Wait for `results` and record their duration, if a trace is recorded."""
        if self._ctx.timeline is not None:
            jax.block_until_ready(results)
            self._ctx.timeline.add(local_index, name, began, **details)

    def _run_kernels(self, level: int) -> None:
        segment = self._plan.microbatches.get(level)
        if segment is None:
            return
        if level not in self._plan.prologues:
            self._started = time.perf_counter()
        self._kernel_outputs[level] = {
            i: self._run_microbatches(i, level, segment)
            if self._microbatches[i]
            else [self._ctx.neutral.outputs(level, i)]
            for i in self._ctx.workers.present
        }

    def _run_microbatches(self, local_index: int, level: int, segment: Segment) -> list[list[jax.Array]]:
        ctx, microbatches, start, kept = self._ctx, self._microbatches[local_index], 0, []
        alone = len(microbatches) == 1
        leaves = jax.tree.leaves(self._share.batches[local_index])
        wanted = [leaves[i] for i in self._steps.inputs["microbatch", level].batch]
        fixed = None if self._kernel_outputs else self._given(local_index, segment)
        parts: list[jax.Array] = []
        for number, size in enumerate(microbatches):
            # With `fixed`, only the batch and the vectors are set for each microbatch.
            given = self._given(local_index, segment, number) if fixed is None else fixed
            given["batch"] = wanted if alone else [leaf[start : start + size] for leaf in wanted]
            vectors = self._vectors[local_index]
            if not alone:
                vectors = self._steps.feed.for_microbatch(vectors, self._readings[local_index], start, size)
            given["floats"], given["ints"] = vectors
            kernel = ctx.kernels.kernel(local_index, size, level)
            given["const"] = list(kernel.consts)
            began, out = time.perf_counter(), kernel.run(given)
            if "parts" in out:
                new = out.pop("parts")
                parts = ctx.programs["add", level, local_index](parts, new) if parts else new
                del new  # so that the next microbatch's parts can take that memory
            if ctx.waiters is None:  # otherwise other threads wait, for several devices
                self._trace(local_index, f"{size} examples", began, (parts, out), level=level)
            kept.append(out["outputs"])
            start += size
        self._packed[local_index] = parts
        return kept

    # --- waiting and timing -------------------------------------------------------------------------------------------

    def _wait(self, level: int) -> dict[int, list[list[jax.Array]]]:
        """Wait until all workers have computed their parts of a level's messages, and record how long that took.

        Returns:
          The parts by message and local index.
        """
        sent = self._plan.sent_at(level)
        for local_index, microbatches in enumerate(self._microbatches):
            if not microbatches:
                self._packed[local_index] = self._ctx.neutral.parts(level, local_index)
        # One thread cannot tell when each of several devices was ready.
        map_ = map if self._ctx.waiters is None else self._ctx.waiters.map
        self._finish(level, list(map_(self._wait_for, self._all_local)))
        return {number: [self._parts_of(number, i) for i in self._all_local] for number in sent}

    def _wait_for(self, local_index: int) -> float:
        self._packed[local_index][0].block_until_ready()
        return time.perf_counter()

    def _finish(self, level: int, ends: Sequence[float]) -> None:
        """Record the durations of a level, which ended on each worker at one of `ends`."""
        for local_index, at in enumerate(ends):
            self._seconds[local_index] += at - self._started
            timeline, microbatches = self._ctx.timeline, self._microbatches[local_index]
            if timeline is not None and self._ctx.waiters is not None and microbatches:
                name = f"{' + '.join(map(str, microbatches))} examples"
                timeline.add(local_index, name, self._started, max(self._started, at), level=level)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _exchange(self, level: int, more: str, *, status_taken: bool) -> tuple[int, Sequence[jax.Array]] | None:
        """Exchange the messages of one level.

        Only this function refers to the sent parts, so that their memory, as large as the gradient, is free afterwards.

        Returns:
          The number and the reduced parts of a message that is not finite; `None` if all are.
        """
        ctx, status_message = self._ctx, self._steps.status_message
        sent = self._wait(level)
        # The previous step's final segment must have finished reading the receive buffers before they are overwritten.
        for result in ctx.workers.committed:
            result.block_until_ready()
        if status_message in sent:
            ctx.status.own_seconds = ctx.activity.of_workers(self._seconds)
        ctx.activity.turn(EXCHANGING)
        arrived = [
            (number, *self._reduced(number, parts, more)) for number, parts in sent.items() if self._travels(number)
        ]
        ctx.activity.turn(COMPUTING)
        checks = self._steps.finite_checks
        for number, results, status in arrived:
            if number == status_message and not status_taken:
                ctx.status.decode(status)
            if checks and not checks[number].passes(results[0]):
                return number, results[0]
            self._messages[number] = results
        return None

    def _reduced(self, number: int, parts: Sequence[Parts], more: str) -> Arrived:
        """Exchange a message, with the status if it is the message for it.

        Args:
          parts: of the message, by local index.
          more: added to the error if processes are in different collectives.
        """
        ctx, steps, step = self._ctx, self._steps, self._readings[0].step + 1
        own = ctx.status.encode() if number == steps.status_message else _NO_STATUS
        own, about = own.astype(parts[0][0].dtype), steps.about(number, step)
        if ctx.timeline is not None:
            ctx.timeline.sends(about)
        ctx.activity.message = number
        message = SentMessage(ctx.neutral.with_gaps(number, parts), own, about, more, step)
        return ctx.channels[number].exchange(message)

    def _travels(self, number: int) -> bool:
        """Return whether a message is sent in this step. If not, each worker's own parts are its results."""
        message = self._plan.messages[number]
        goes = message.travels
        if goes and message.gate is not None:
            goes = bool(self._prologue_outputs[0][self._ctx.workers.some_present][message.gate])
        if goes:
            self._sent.append(number)
        else:
            self._messages[number] = [self._parts_of(number, i) for i in self._all_local]
        return goes

    def _n_sent(self) -> tuple[int, int]:
        """Return how many messages this step has sent, and their bytes."""
        return len(self._sent), sum(self._steps.layouts[number].nbytes for number in self._sent)

    def _parts_of(self, number: int, local_index: int) -> list[jax.Array]:
        """Return the parts of one message of the current level, as a worker has packed them."""
        return self._packed[local_index][self._steps.part_slices[number]]

    # --- ending -------------------------------------------------------------------------------------------------------

    def _give_up(self, number: int, reduced: Sequence[jax.Array], *, search: bool) -> Outcome:
        inputs = self._share, self._readings, self._microbatches
        failed = FailedStep(*inputs, self._packed, self._messages, self._sent, self._seconds)
        return give_up(self._ctx, failed, number, reduced, search=search)

    def _own(self, local_index: int) -> tuple[dict[int, jax.Array], dict[int, list[jax.Array]]]:
        """Return copies of a worker's local leaves of state and operator states, by number.

        A worker without examples keeps them.
        """
        workers, plan = self._ctx.workers, self._plan
        state, op_states = workers.states[local_index], workers.op_states[local_index]
        return (
            {i: jnp.copy(state[i]) for i in plan.changed_state if i in plan.local_state},
            {k: list(map(jnp.copy, op_states[k])) for k, s in enumerate(plan.op_states) if s.scope != Scope.ALL},
        )

    def commit(self) -> tuple[list[list[jax.Array]], list[jax.Array]]:
        """Run the final segment, whose results become the workers' state.

        Returns:
          The leaves of each hook's values, and the leaves of the metrics.
        """
        ctx, workers, final, found = self._ctx, self._ctx.workers, self._plan.final, self._steps.results
        self._packed = []  # frees memory as large as the gradient for the final segment
        own = {i: self._own(i) for i in workers.present if not self._microbatches[i]}
        results = []
        for local_index in workers.present:
            given, state = self._whole(local_index, final), workers.states[local_index]
            given_up = [state[i] for i in found.overwritten], given["op_state"]
            given["state"], given["op_state"] = [state[i] for i in found.read_only], []
            began = time.perf_counter()
            try:
                results.append(ctx.programs["final", 0, local_index](given_up, given))
            except jax.errors.JaxRuntimeError as error:
                check_update(error)
                raise
            self._trace(local_index, "final", began, results[-1])
        workers.committed = [outputs[0] for outputs in results if outputs]
        for local_index, outputs in zip(workers.present, results, strict=True):
            state, op_states = workers.states[local_index], [outputs[place] for place in found.op_states]
            for i, new in zip(self._plan.changed_state, outputs, strict=False):  # the state's outputs come first
                state[i] = new
            workers.op_states[local_index] = op_states
            if local_index in own:
                own_leaves, own_op_states = own[local_index]
                for i, leaf in own_leaves.items():
                    state[i] = leaf
                for k, values in own_op_states.items():
                    op_states[k] = values
        first = results[0]
        return [first[place] for place in found.hooks], first[found.metrics]
