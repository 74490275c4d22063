"""One suite over all worlds, and what belongs to one of them."""
