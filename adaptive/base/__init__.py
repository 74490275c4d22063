"""Definitions that every package may import: errors, lines of the driver, the world, decisions."""
