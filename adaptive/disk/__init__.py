"""Checkpoints as files: the directory of checkpoints, and its writer lock."""
