"""Objects that hooks and callbacks can read besides their arguments, compared between two traces of a driver.

A driver's computation is in its graph, where two traces can be compared. Hooks and callbacks are Python functions. They
may read the size of a microbatch from any object that the driver creates or writes to: a closure variable, a default
argument, an attribute, a global. So all objects that they can reach are compared:

* Objects that each trace creates are compared part by part. If an object's parts cannot be read, it cannot be compared,
  which is reported.
* Objects that outlive a trace are the same in both traces, and differ only if a trace writes to them. So a record of
  them is made after each trace, limited to the attributes that the functions' code mentions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

from .reach import Label, Opaque, is_live, names_in, parts_of, same_arrays, sample_of, value_of

_MOST = 10_000  # objects in a record
_LONG = 1_000  # longer sequences are first compared as a whole
_ENOUGH = 20  # differences to report
_ROUNDS = 6  # of searching for further functions by the names in those found so far


class Difference(NamedTuple):
    """A difference between the functions of two traces.

    Attributes:
      path: the variable and its function, in words.
      values: the value in each trace, abbreviated.
      judged: whether the values are known to differ; if not, they could not be compared.
    """

    path: str
    values: tuple[str, str]
    judged: bool


class Record:
    """A record of all objects that functions can reach now.

    Args:
      roots: functions, partials, policies.
    """

    def __init__(self, roots: Sequence[Any]):
        names: frozenset[str] = frozenset()
        for _ in range(_ROUNDS):
            found: set[str] = set()
            self._roots = _recorded(roots, names, found)
            if found <= names:
                break
            names |= found

    def differences(self, other: Record, *, outlasting: bool = True) -> Iterator[Difference]:
        """Yield the differences from another trace's functions, those with the shortest path first.

        Args:
          outlasting: also compare objects that outlive a trace, by their recorded state.
        """
        seen: dict[tuple[int, int], tuple[_Node, _Node]] = {}  # keeps nodes alive: an id could be another one's later
        found = 0
        pairs = zip(self._roots, other._roots, strict=False)  # two traces have the same hooks and callbacks
        todo: deque[tuple[tuple[Label, ...], _Node, _Node]] = deque(((), one, two) for one, two in pairs)
        while todo and found < _ENOUGH:
            path, one, two = todo.popleft()
            if one.value is None:
                if (id(one), id(two)) in seen:
                    continue
                seen[id(one), id(two)] = one, two
            alike: bool | None = True
            parts: _Pairs = []
            if one.thing is not two.thing:
                alike, parts = _compared(one, two)
            elif outlasting:
                alike, parts = _compared_with_itself(one, two)
            if not alike:
                found += 1
                yield Difference(in_words(path), (_brief(one.thing), _brief(two.thing)), alike is False)
            todo += [((*path, label), a, b) for label, a, b in parts]


class _Node:
    """An object, with its parts at the time of recording.

    Attributes:
      value: the value to compare, if it is a plain value, or an array that may be written to.
      parts: by label and index among parts with this label; `None` if they were not recorded.
    """

    __slots__ = ("parts", "thing", "value")

    def __init__(self, thing: Any):
        self.thing, self.value = thing, value_of(thing)
        self.parts: dict[_Key, _Node] | None = None

    def all_parts(self) -> dict[_Key, _Node]:
        """Return all parts: recorded parts in their recorded state, others in their current state."""
        recorded = self.parts or {}
        return {key: recorded.get(key) or _Node(part) for key, part in _numbered(parts_of(self.thing))}


_Key = tuple[Label, int]
_Pairs = list[tuple[Label, _Node, _Node]]


def _recorded(roots: Sequence[Any], names: frozenset[str], found: set[str]) -> list[_Node]:
    """Record all reachable objects, nearest first. Adds the names that functions on the way mention to `found`."""
    first = [_Node(root) for root in roots]
    known, todo = {id(node.thing): node for node in first}, deque(first)
    while todo and len(known) < _MOST:
        node = todo.popleft()
        found |= names_in(node.thing)
        if node.value is None:
            node.value = sample_of(node.thing)
        if node.value is not None:
            continue
        try:
            parts = _numbered(parts_of(node.thing, names))
        except Opaque:
            continue
        node.parts = {}
        for key, part in parts:
            child = known.get(id(part))
            if child is None:
                child = known[id(part)] = _Node(part)
                todo.append(child)
            node.parts[key] = child
    return first


def _numbered(parts: list[tuple[Label, Any]]) -> list[tuple[_Key, Any]]:
    count: Counter[Label] = Counter()
    numbered = []
    for label, part in parts:
        numbered.append(((label, count[label]), part))
        count[label] += 1
    return numbered


def _compared_with_itself(one: _Node, two: _Node) -> tuple[bool, _Pairs]:
    """Compare an object's state after one trace with its state after another."""
    if one.parts is None or two.parts is None:
        return one.value == two.value, []
    return _paired(one.parts, two.parts)


def _compared(one: _Node, two: _Node) -> tuple[bool | None, _Pairs]:
    """Compare two objects, each created by one trace. Returns whether they are equal (`None` if they cannot be
    compared), and pairs of parts that remain to be compared.
    """
    a, b = one.thing, two.thing
    if is_live(a) and is_live(b):
        return True, []
    arrays = same_arrays(a, b)
    if arrays is not None:
        return arrays, []
    if value_of(a) is not None or value_of(b) is not None:
        return value_of(a) == value_of(b), []
    if type(a) is not type(b) and type(a).__qualname__ != type(b).__qualname__:
        return False, []
    if isinstance(a, Sized) and len(a) > _LONG and _equal(a, b):
        return True, []
    try:
        alike, pairs = _paired(one.all_parts(), two.all_parts())
        return alike, pairs if alike else []
    except Opaque:
        return True if _equal(a, b) else None, []


def _paired(ours: dict[_Key, _Node], theirs: dict[_Key, _Node]) -> tuple[bool, _Pairs]:
    return ours.keys() == theirs.keys(), [(key[0], ours[key], theirs[key]) for key in ours if key in theirs]


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # whatever a library raises
        return False


def in_words(path: Iterable[Label]) -> str:
    """Return a description of a path: the variable and its function."""
    text = tail = ""
    for label in path:
        if label.tail:
            text, tail = label.text, label.tail
        else:
            text += label.text if text else label.alone or label.text.lstrip(".")
    return f"{text}{tail}"


def _brief(thing: Any) -> str:
    try:
        text = " ".join(repr(thing).split())
    except Exception:  # an object that is not fully initialized
        text = f"a {type(thing).__name__}"
    return text if len(text) <= 50 else f"{text[:50]}…"
