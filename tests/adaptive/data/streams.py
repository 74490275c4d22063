"""Numbered examples, and what streams of them give."""

from __future__ import annotations

import threading

import numpy as np


def numbered(count, first=0):
    numbers = np.arange(first, first + count)
    return {"number": numbers, "row": np.stack([numbers, -numbers], axis=1).astype(np.float32)}


class Source:
    """Grain-like: `source[i]` is one example of `numbered`, unless it is broken."""

    def __init__(self, count, first=0):
        self.count, self.first, self.broken, self.read, self.threads = count, first, set(), [], set()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert 0 <= index < self.count
        self.threads.add(threading.get_ident())
        self.read.append(index)
        if index in self.broken:
            raise OSError(f"example {index} cannot be read")
        return {"number": self.first + index, "row": np.float32([self.first + index, -self.first - index])}


def batches(stream, plan, ahead=True):
    """The batches of this process's workers in each step of a plan, fetched ahead or not."""
    for sizes in plan:
        share = stream.take(sizes)
        if ahead:
            stream.prefetch(sizes)
        stream.advance(sizes)
        yield share.batches
