"""Threads that read examples of one source at the same time (`num_threads=`)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from adaptive.base.ambient import AmbientContext

from .fetch_thread import FetchThread


class ReaderThreads:
    """Reads in several threads, the calling one included.

    Args:
      number: the number of threads, at least 1.
    """

    def __init__(self, number: int):
        self._others = [FetchThread(f"adaptive-input-{i}") for i in range(1, number)]

    def map(self, read: Callable[[int], Any], count: int) -> list[Any]:
        """Return the results of `read` for the numbers below `count`, in order.

        Raises:
          Exception: the error of `read` for the lowest number for which it fails, whatever the threads' timing.
        """
        if not self._others or count < 2:
            return [read(place) for place in range(count)]
        places, lock, found = itertools.count(), threading.Lock(), [None] * count
        errors: dict[int, BaseException] = {}

        def work() -> None:
            while not errors:
                with lock:
                    place = next(places)
                if place >= count:
                    return
                try:
                    found[place] = read(place)
                except BaseException as error:
                    errors[place] = error

        ambient = AmbientContext()
        running = [thread.submit(ambient.run, work) for thread in self._others[: count - 1]]
        work()
        for future in running:
            future.result()
        if errors:
            raise errors[min(errors)]
        return found

    def close(self) -> None:
        """End the threads."""
        for thread in self._others:
            thread.close()
