from __future__ import annotations

import sys

from adaptive.base.process.thread_status import thread_status, thread_status_of


@thread_status("in evaluate")
def evaluate():
    return thread_status_of(sys._getframe())


@thread_status("waiting for a kernel", compiles=True)
def wait():
    return evaluate()


@thread_status("in message 1", exchanges=True)
def exchange():
    return evaluate()


def test_a_thread_does_what_the_functions_that_it_is_in_say():
    found = evaluate()
    assert (found.words, found.compiles, found.exchanges) == (("in evaluate",), False, False)
    assert found.line.startswith("test_thread_status.py:")
    assert (wait().words, wait().compiles) == (("in evaluate", "waiting for a kernel"), True)
    assert (exchange().compiles, exchange().exchanges) == (False, True)
    assert str(thread_status_of(None)) == "in the script's own code, between steps"
