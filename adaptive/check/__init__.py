"""Checks whether a step's result depends on how its batch is split."""
