"""`python -m collectives.doctor`: what `adaptive doctor` is."""

from .command import doctor

doctor(prog_name="adaptive doctor")
