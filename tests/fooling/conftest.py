"""The worlds of tests/program."""

from tests.program.conftest import world as world
