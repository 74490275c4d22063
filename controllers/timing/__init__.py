"""Models of step time, exact allocations of a batch to workers, and curves of efficiency: what policies are made of."""

from typing import TYPE_CHECKING

from adaptive.base.process.on_use import on_use

if TYPE_CHECKING:
    from controllers.policies.noise import efficiency as efficiency

    from ._allocate import allocate as allocate
    from ._batch_time import BatchTime as BatchTime
    from ._time_model import TimeModel as TimeModel

__getattr__, __dir__ = on_use(
    __name__,
    {
        "allocate": "._allocate",
        "BatchTime": "._batch_time",
        "TimeModel": "._time_model",
        "efficiency": "controllers.policies.noise",
    },
)
