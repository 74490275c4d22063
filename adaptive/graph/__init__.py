"""From a driver to a plan: traced, checked, cut."""
