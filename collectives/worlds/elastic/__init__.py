"""Processes that join, leave and wait on standby."""
