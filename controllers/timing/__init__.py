"""How the time of a step goes with the batch."""
