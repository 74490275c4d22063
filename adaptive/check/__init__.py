"""Whether a step depends on its split."""
