"""The common step, without the bookkeeping of the general one: one worker, one kernel call, messages of one level.

`step.py` carries out any step: several workers, calls, levels and stages. Most steps need none of that, and on a short
step the time goes into Python. Both give the same bits (tests/adaptive/test_steady_step.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from adaptive.base.activity import COMPUTING, EXCHANGING, OTHER
from adaptive.data.stream import Share
from adaptive.graph.plan import Plan
from adaptive.operators.sources import Reading

from .microbatches import Microbatches
from .step import Outcome, Step

if TYPE_CHECKING:
    from .engine import Engine


def is_flat(plan: Plan, workers: int) -> bool:
    """Return whether steps of a plan can be taken as `SteadyStep` does, for so many workers of this process."""
    return (
        workers == 1
        and plan.levels == 1
        and list(plan.calls) == [0]
        and not plan.onces
        and not plan.stages
        and all(message.gate is None for message in plan.messages)
    )


class SteadyStep:
    """Takes steps of one worker by one kernel call; all messages are of one level, and none is sent now and then only.

    Args:
      engine: whose steps; its plan `is_flat`.
    """

    def __init__(self, engine: Engine):
        plan, found = engine.plan, engine._results
        call, final = plan.calls[0], plan.final
        self._engine = engine
        self._call_state, self._call_slots = call.reads("state"), call.wiring["slot"]
        self._batch = call.reads("batch")
        self._overwritten, self._read_only = found.overwritten, found.read_only
        self._final_slots, self._final_kept = final.wiring["slot"], [i for _, i in final.wiring["call"]]
        self._final_messages = final.read_messages
        self._final_consts = engine.consts["final", final.level, 0]
        numbers = range(len(plan.messages))
        self._sent = [number for number in numbers if plan.messages[number].travels]
        self._stay = [number for number in numbers if not plan.messages[number].travels]
        self._bytes = sum(engine.layouts[number].nbytes for number in self._sent)
        self._on_host = engine.world.devices[0].platform == "cpu"

    def fits(self, microbatches: Sequence[Microbatches]) -> bool:
        """Return whether a step of these calls can be taken; else the general one takes it."""
        return len(microbatches[0]) == 1 and self._engine.timeline is None and self._engine.present == [0]

    def __call__(
        self,
        share: Share,
        readings: Sequence[Reading],
        microbatches: Sequence[Microbatches],
        meanwhile: Callable[[], None],
        search: bool,
        more: str,
    ) -> Outcome:
        """Compute, exchange, and commit: the arguments and the result of `Engine.step`."""
        engine, reading = self._engine, readings[0]
        activity, (size,) = engine.activity, microbatches[0]
        floats, ints = engine.feed.measure(reading)
        kernel = engine.kernels.kernel(0, size, 0)
        state, slots = engine.states[0], engine.slots[0]
        leaves = jax.tree.leaves(share.batches[0])
        began, computed = time.perf_counter(), time.process_time()
        given: dict[str, Any] = {
            "state": list(map(state.__getitem__, self._call_state)),
            "slot": self._call_slots and [slots[k][leaf] for k, leaf in self._call_slots],
            "batch": list(map(leaves.__getitem__, self._batch)),
            "const": list(kernel.consts),
            "floats": floats,
            "ints": ints,
            "once": [],
            "call": [],
            "message": [],
        }
        out = kernel.run(given)
        meanwhile()
        packed = out["parts"]
        seconds = self._wait(packed, size, began, computed)
        for result in engine._committed:  # what the step before has read must be done with before it is written again
            result.block_until_ready()
        if engine.tells:
            engine.status.told = activity.of_workers([seconds])
        activity.turn(EXCHANGING)
        parts = [packed[place] for place in engine._places]
        under_way = [engine._send(n, [parts[n]], reading.step + 1, more, None) for n in self._sent]
        arrived = [(message, *message.arriving.wait()) for message in under_way]
        activity.turn(COMPUTING)
        messages = {number: [parts[number]] for number in self._stay}
        for message, results, heard in arrived:
            if message.number == engine._last:
                engine.status.decode(heard)
            if message.look is not None and not message.look.passes(results[0], message.glances):
                run = Step(engine, share, readings, microbatches)
                run.take_over(packed, messages, self._sent, seconds)
                return run.given_up(message.number, results[0], search)
            messages[message.number] = results
        outputs = self._commit(floats, ints, out["outputs"], messages)
        activity.turn(OTHER)
        hooks, metrics = [outputs[place] for place in engine._results.hooks], outputs[engine._results.metrics]
        return Outcome(hooks, metrics, messages, [seconds], list(microbatches), len(self._sent), self._bytes)

    def _wait(self, packed: Sequence[jax.Array], size: int, began: float, computed: float) -> float:
        """Wait for the call, and record how long it took. Returns its seconds."""
        packed[self._engine._places[0].start].block_until_ready()
        seconds = time.perf_counter() - began
        undisturbed = min(seconds, time.process_time() - computed) if self._on_host else seconds
        self._engine.kernels.record(0, size, undisturbed)
        return seconds

    def _commit(self, floats: Any, ints: Any, kept: Sequence[jax.Array], messages: dict[int, Any]) -> Any:
        """Run the final segment and take its results as the worker's state. Returns them."""
        engine = self._engine
        state, slots = engine.states[0], engine.slots[0]
        given_up = (
            list(map(state.__getitem__, self._overwritten)),
            self._final_slots and [slots[k][leaf] for k, leaf in self._final_slots],
        )
        given: dict[str, Any] = {
            "state": list(map(state.__getitem__, self._read_only)),
            "call": list(map(kept.__getitem__, self._final_kept)),
            "message": self._final_messages and [messages[number][0] for number in self._final_messages],
            "const": self._final_consts,
            "floats": floats,
            "ints": ints,
            "once": [],
            "slot": [],
            "batch": [],
        }
        outputs = engine._compiled["final", 0, 0](given_up, given)
        engine._committed = outputs[:1]
        for i, new in zip(engine.plan.changed_state, outputs, strict=False):  # first come the state's
            state[i] = new
        engine.slots[0] = engine._results.slots and [outputs[place] for place in engine._results.slots]
        if engine.new_nans is not None:
            engine.new_nans.committed(outputs[-1:])
        return outputs
