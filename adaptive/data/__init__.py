"""Data to train on: what has an index, and what has none; see docs/input.md."""

from .adapters import from_source as from_source
from .iterable import from_iterator as from_iterator
