"""Carrying out one step."""
