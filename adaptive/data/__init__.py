"""Training data: data sets with an index, and iterators; see docs/input.md."""

from .adapters import from_source as from_source
from .iterable import from_iterator as from_iterator
