"""Policies and predictors as their papers describe them: LB-BSP, dynamic batching, leader and stragglers.

`controllers.balance`, `controllers.noise_batch` and the others in `controllers` are the ones to begin with.
"""

from typing import TYPE_CHECKING

from adaptive.base.process.on_use import on_use

if TYPE_CHECKING:
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

__getattr__, __dir__ = on_use(
    __name__,
    {
        "lb_bsp": "._lb_bsp",
        "leader_straggler": "._leader_straggler",
        "proportional": "._proportional",
        "cores": "._static",
        "static_proportional": "._static",
        "arx": "controllers.predictors.arx",
        "Predictor": "controllers.predictors.base",
        "best_of": "controllers.predictors.base",
        "memoryless": "controllers.predictors.base",
        "moving_average": "controllers.predictors.base",
        "narx": "controllers.predictors.narx",
    },
)
