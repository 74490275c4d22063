"""Execution of a step: compiled programs, kernels, messages and the workers' state."""
