"""The policies, one per file."""
