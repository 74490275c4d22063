"""Predictors of workers' speeds."""
