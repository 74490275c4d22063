"""Checkpoints as files: the directory of checkpoints, which orbax writes and reads, and its writer lock."""
