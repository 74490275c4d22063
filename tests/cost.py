"""What a test may cost: a test without the mark `ranks` or `long` fails if it takes much of the processor.

Measured are the seconds of the processor, so a busy machine does not matter much, less the time in which XLA compiles
or reads what it has compiled before, so that an empty `.pytest_cache/` does not matter either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import jax
import pytest

from tests import jaxrun, ranks, speed
from tests.mpirun import STARTED

SECONDS = 1.0  # of an idle core
_COMPILING = "/jax/core/compile/backend_compile_duration"


class Cost:
    """A plugin of pytest that measures the call of each test; what fixtures do is not counted."""

    def __init__(self, now: Callable[[], float] = time.process_time):
        self._now, self._compiling = now, 0.0
        speed.processor_slowness()  # before a test puts a clock of its own there

    def add(self, event: str, seconds: float, **_) -> None:
        """Hear of an event of JAX."""
        if event == _COMPILING:
            self._compiling += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        begin, compiling = self._now(), self._compiling
        result = yield
        used = self._now() - begin - (self._compiling - compiling)
        exempt, own = any(map(item.get_closest_marker, ("ranks", "long"))), item.get_closest_marker("seconds")
        least = SECONDS if own is None else own.args[0]
        if used > speed.processor_limit(least) and not exempt:
            pytest.fail(
                f"took {used:.1f} s of the processor, and should take less than {least:g} in `make test`. Make it "
                "shorter: fewer steps, sizes or parameters, or a program that a fixture builds for a whole module. "
                "Or mark it with @pytest.mark.long: then only `make test-all` runs it.",
                pytrace=False,
            )
        return result


def register(config: pytest.Config) -> None:
    """Hold tests to their cost; not in the processes of jobs, nor with TESTS_ANY_COST, which `make mutants` sets."""
    if not (os.environ.keys() & {"TESTS_ANY_COST", STARTED, ranks.JOB, jaxrun.JOB}):
        cost = Cost()
        jax.monitoring.register_event_duration_secs_listener(cost.add)
        config.pluginmanager.register(cost, "cost")
