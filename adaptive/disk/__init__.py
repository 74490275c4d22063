"""Checkpoints as files: arrays by orbax, what is whole, which is the newest, and who may write."""
