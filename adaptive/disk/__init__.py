"""Checkpoints as files: the directory of checkpoints, which orbax writes, and its writer lock."""
