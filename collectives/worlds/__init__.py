"""The worlds: what carries a message."""
