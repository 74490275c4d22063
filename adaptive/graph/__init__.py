"""From a driver to a plan: tracing, checking and partitioning its graph."""
