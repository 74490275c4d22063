"""`python -m controllers.simulate`: the same as `adaptive simulate`."""

from ._command import simulate

simulate(prog_name="python -m controllers.simulate")
