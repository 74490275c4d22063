"""Try policies without a cluster: on simulated workers under a virtual clock, or on a recorded run.

    adaptive simulate step_change --png step_change.png

or from Python, with the same policy objects as in a driver:

    from controllers.simulate import Cluster, jitter, simulate

    cluster = Cluster(ctrl.timing.BatchTime(slope=(1e-3, 2e-3), intercept=(0.01, 0.01)), noise=jitter(0.05))
    simulation = simulate(ctrl.balance(), cluster, sizes=256, steps=200)
    simulation.total_seconds, simulation.adjustments, simulation.over_ideal
"""

from ._cluster import Cluster as Cluster
from ._cluster import by_step as by_step
from ._cluster import jitter as jitter
from ._cluster import stages as stages
from ._cluster import waves as waves
from ._line_up import LINE_UP as LINE_UP
from ._line_up import hooked as hooked
from ._recording import Recording as Recording
from ._recording import read_trace as read_trace
from ._replay import fit as fit
from ._replay import replay as replay
from ._scenarios import Scenario as Scenario
from ._scenarios import names as names
from ._scenarios import scenario as scenario
from ._simulation import Hooked as Hooked
from ._simulation import Simulation as Simulation
from ._simulation import simulate as simulate
