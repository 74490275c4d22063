"""The worlds of tests/program."""

from tests.program.conftest import workers as workers
from tests.program.conftest import world as world
