"""What devices hold while something runs: looked at whenever an array may have been made."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import jax

_MAKING = {"device_put", "asarray", "array", "copy", "make_array_from_single_device_arrays"}
_OURS = ("worker_state.py", "host_step.py", "sharded_parts.py", "checkpoint.py", "restore.py", "placement.py")


class Watch:
    """Watches the arrays of this thread's program, in a `with` block.

    Args:
      before: arrays that are not counted; by default all that live.

    Attributes:
      most: the most bytes that one device has held.
      largest: the bytes of the largest array, or part of one, on one device.
    """

    def __init__(self, before: list[jax.Array] | None = None):
        gc.collect()
        self._before = jax.live_arrays() if before is None else before  # kept, so that no other gets their ids
        self._known = set(map(id, self._before))
        self.most = self.largest = 0

    def __enter__(self) -> Watch:
        self.look()
        sys.setprofile(self._returned)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self.look()

    def _returned(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and (code.co_name in _MAKING or code.co_filename.endswith(_OURS)):
            self.look()

    def look(self) -> None:
        """Count what the devices hold now."""
        held: dict[Any, dict[int, int]] = defaultdict(dict)
        for array in jax.live_arrays():
            if id(array) not in self._known:
                for shard in array.addressable_shards:
                    held[shard.device][shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        for parts in held.values():
            self.most = max(self.most, sum(parts.values()))
            self.largest = max(self.largest, *parts.values())
