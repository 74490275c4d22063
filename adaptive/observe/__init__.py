"""Events of a run and their consumers: listeners, sinks, the progress line, warnings and the record."""
