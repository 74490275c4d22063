"""Data to train on: what has an index, and what has none; see docs/input.md."""

from .iterated import from_iterator as from_iterator
from .kinds import from_source as from_source
