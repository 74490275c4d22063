"""A thread per rank that finds ranks which are stuck."""
