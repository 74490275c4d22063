"""Examples, and the order in which they are taken."""
