"""Checkpoints as files: arrays by orbax, manifests, the directory of checkpoints, and its writer lock."""
