"""Tests of the trunk: each part by itself, in one process."""
