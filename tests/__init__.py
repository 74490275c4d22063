"""The test suite; a package, so that `tests.mpirun` is found by that name."""
