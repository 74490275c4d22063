"""Which outputs of a step must not depend on a contribution that depends on the split. Read from the graph alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from adaptive.base.source_lines import at
from adaptive.graph.plan import Contribution, Plan
from adaptive.operators.sources import MICROBATCHES

from .influence import Facts, Influence, Place
from .trials import Output


class Relevance:
    """The contributions and outputs of one plan, and which of them count for each other."""

    def __init__(self, plan: Plan, influence: Influence, outputs: Sequence[Output]):
        self._plan, self._influence, self._outputs = plan, influence, outputs

    @cached_property
    def places(self) -> list[Place]:
        """The contributions whose differences count in some output."""
        return [p for p in self._influence.places if any(self.counts(p, output) for output in self._outputs)]

    def counts(self, place: Place, output: Output) -> bool:
        """Return whether an output must not depend on a contribution that depends on the split."""
        of = self._influence.of(output.atom)
        unread = output.kind == "op_state" and not self._op_state_is_read(output)
        if unread or not of.through & self._influence.bit[place]:
            return False
        sent, c = self.facts(place), self.contribution(place)
        as_it_is = c.how.shows_workers and output.atom is c.result
        over_calls = bool(sent.sources) and MICROBATCHES.name in of.sources
        return self.is_state(output) or (sent.of_data and not as_it_is and not over_calls)

    def counted(self, output: Output) -> list[str]:
        """Return where the driver reads the numbers of workers that an output depends on, and must not.

        Metrics and hook values may report the number of workers, but not mix it with the examples' values.
        """
        of = self._influence.of(output.atom)
        if not self.is_state(output) and not (of.of_data and MICROBATCHES.name not in of.sources):
            return []
        return [where for bit, where in self._influence.counts.items() if of.through & bit]

    def is_of_count(self, place: Place) -> bool:
        """Return whether a contribution is computed from a number of workers."""
        return any(self.facts(place).through & bit for bit in self._influence.counts)

    def is_state(self, output: Output) -> bool:
        """Return whether an output is state of the driver, or an operator state that such state is computed from."""
        of_state = output.kind == "op_state" and bool(self._op_states_of_state & 1 << output.number)
        return output.kind == "state" or of_state

    def reaches_state(self, place: Place) -> bool:
        """Return whether any state depends on a contribution."""
        return any(self.is_state(o) and self.counts(place, o) for o in self._outputs)

    def contribution(self, place: Place) -> Contribution:
        return self._plan.messages[place[0]][place[1]]

    def facts(self, place: Place) -> Facts:
        return self._influence.carried(self.contribution(place))

    def label(self, place: Place) -> str:
        """Return a contribution's name and line, for texts."""
        c = self.contribution(place)
        how = "" if c.how.reduces else f", by {c.how.name}"
        return f"{c.name or 'a value'}{how}{at(c.line)}"

    def _op_state_is_read(self, output: Output) -> bool:
        bit = 1 << output.number
        others = [o for o in self._outputs if (o.kind, o.number) != (output.kind, output.number)]
        return any(self._influence.of(o.atom).op_states & bit for o in others)

    @cached_property
    def _op_states_of_state(self) -> int:
        """The operator states that the state of a later step is computed from; bit mask."""
        read = 0
        for o in self._outputs:
            read |= self._influence.of(o.atom).op_states if o.kind == "state" else 0
        while True:
            more = read
            for o in self._outputs:
                if o.kind == "op_state" and read & 1 << o.number:
                    more |= self._influence.of(o.atom).op_states
            if more == read:
                return read
            read = more
