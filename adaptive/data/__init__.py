"""Training data: arrays, sources with an index, and iterators; see docs/input.md."""

from .iterators import from_iterator as from_iterator
from .rows import from_source as from_source
