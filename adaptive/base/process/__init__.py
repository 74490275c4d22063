"""This process and its host: signals, threads, memory, launcher, and lines of source code."""
