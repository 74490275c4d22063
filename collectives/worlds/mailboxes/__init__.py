"""Mailboxes: memory to which workers publish vectors, and from which others copy them at any time."""
