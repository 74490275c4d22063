"""Write down which blocks of code a process executes, for which test; `tools/block_map.py` inserts `hits[block]`.

This file is copied to the root of the recorded tree, so that it is found wherever the packages are. It imports nothing
but what each process has.
"""

from __future__ import annotations

import os

FOLDER, TEST = "BLOCK_MAP", "BLOCK_MAP_TEST"  # variables of the environment: where to write; the test that runs
_process, _file = 0, -1


class _Hits(dict[int, None]):
    """Writes down a block when it is looked up, once per test.

    Later lookups are no calls of Python functions: some tests count those.
    """

    def __missing__(self, block: int) -> None:
        self[block] = None
        _write(f"{block}\n")


hits = _Hits()


def start(test: str) -> None:
    """Have what follows belong to a test, also in the processes that are started from here."""
    os.environ[TEST] = test
    hits.clear()
    _write(f"{test}\n")


def _write(line: str) -> None:
    """Append to this process's file. A process may be killed at any time, so nothing waits in memory."""
    global _process, _file
    if FOLDER not in os.environ:
        return
    if _process != os.getpid():  # also in a child made by fork
        _process = os.getpid()
        path = os.path.join(os.environ[FOLDER], f"{_process}-{os.urandom(4).hex()}.hits")
        _file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        line = f"{os.environ.get(TEST, '')}\n{line}"
    try:
        os.write(_file, line.encode())
    except OSError:  # closed by a test that closes what it does not know
        _process = 0
