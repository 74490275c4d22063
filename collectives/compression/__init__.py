"""Formats in which values are sent: narrower floats, and codes of 8, 4 and 2 bits."""
