"""Mailboxes: memory where workers publish vectors, and from which other workers copy them at any time."""
