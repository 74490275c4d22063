"""A recorded run as one page for a person: what changed when and why, and where the time went."""
