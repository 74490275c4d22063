"""Between two steps: hooks, decisions, batch sizes, membership, and the status that processes exchange."""
