"""`python -m controllers.simulate`: what `adaptive simulate` is."""

from ._command import simulate

simulate(prog_name="python -m controllers.simulate")
