"""The HTML report of a recorded run: what changed, when and why, and where the time went."""
