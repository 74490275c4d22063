"""`python -m collectives.doctor`: the same as `adaptive doctor`."""

from .command import doctor

doctor(prog_name="adaptive doctor")
