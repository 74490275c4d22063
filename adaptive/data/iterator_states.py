"""An iterator's state as JSON, for checkpoints and for other processes.

grain includes `repr(data_source)` in a state, and accepts a state only with the same text. For a class without a
`__repr__` this text contains the object's address, which differs between processes. So addresses are removed from the
stored state, and the restoring process inserts its own.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


def state_of(iterator: Any) -> Any:
    """Return the state of an iterator for `set_state`, as JSON without addresses; None if it has none.

    Only `get_state`, grain's method, promises the same examples afterwards. The `state_dict` of Hugging Face's data
    sets loses the examples in a shuffle buffer.
    """
    get_state = getattr(iterator, "get_state", None)
    state = None if get_state is None else get_state()
    if isinstance(state, bytes):
        parsed = _parsed(state)
        state = state if parsed is None else json.dumps(_without_addresses(parsed)).encode()
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return None if state is None else {"json": _without_addresses(json.loads(json.dumps(state, default=_number)))}
    except (TypeError, ValueError):
        return None


def set_state(iterator: Any, state: Any) -> None:
    """Continue an iterator that has just begun from what `state_of` returned.

    Raises:
      Exception: what the iterator's own `set_state` raises.
    """
    if "json" in state:
        iterator.set_state(_with_addresses(state["json"], iterator.get_state()))
        return
    kept = base64.b64decode(state["bytes"])
    parsed, own = _parsed(kept), iterator.get_state()
    if parsed is not None and isinstance(own, bytes):
        kept = json.dumps(_with_addresses(parsed, _parsed(own))).encode()
    iterator.set_state(kept)


def _parsed(state: bytes) -> Any:
    """Return the JSON object that a state encodes; None if it is something else."""
    try:
        found = json.loads(state)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _without_addresses(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_addresses(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_without_addresses(value) for value in state]
    return _ADDRESS.sub("", state) if isinstance(state, str) else state


def _with_addresses(state: Any, own: Any) -> Any:
    """Return a state with this process's texts in place of those that differ from them only by addresses.

    Args:
      state: the stored state.
      own: the state of this process's iterator.
    """
    if isinstance(state, dict) and isinstance(own, dict):
        return {key: _with_addresses(value, own.get(key)) for key, value in state.items()}
    if isinstance(state, list) and isinstance(own, list) and len(state) == len(own):
        return [_with_addresses(*values) for values in zip(state, own, strict=True)]
    if isinstance(state, str) and isinstance(own, str) and _ADDRESS.sub("", own) == state:
        return own
    return state


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"no JSON: {type(value).__name__}")
