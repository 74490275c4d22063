"""Policies and predictors as their papers describe them: LB-BSP, dynamic batching, leader and stragglers.

`controllers.balance`, `controllers.noise_batch` and the others in `controllers` are the ones to begin with.
"""

from controllers.predictors.arx import arx as arx
from controllers.predictors.base import Predictor as Predictor
from controllers.predictors.base import best_of as best_of
from controllers.predictors.base import memoryless as memoryless
from controllers.predictors.base import moving_average as moving_average
from controllers.predictors.narx import narx as narx

from ._lb_bsp import lb_bsp as lb_bsp
from ._leader_straggler import leader_straggler as leader_straggler
from ._proportional import proportional as proportional
from ._static import cores as cores
from ._static import static_proportional as static_proportional
