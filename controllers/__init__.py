"""Controllers: hooks, and policies that adapt batch sizes, workers and hyperparameters during training.

`hook` passes values of the driver to a function or a policy. The program applies their requests between steps.
"""

from typing import TYPE_CHECKING

from adaptive.base.process.on_use import on_use

from ._control import Control as Control
from ._hook import hook as hook
from ._policy import Policy as Policy

if TYPE_CHECKING:
    from . import published as published
    from . import timing as timing
    from ._critical_batch import BatchBranch as BatchBranch
    from ._critical_batch import CriticalBatch as CriticalBatch
    from ._critical_batch import measure_critical_batch as measure_critical_batch
    from ._learning_rate import ScaleByBatchState as ScaleByBatchState
    from ._learning_rate import scale_by_batch as scale_by_batch
    from ._scale_adamw import ScaleAdamWState as ScaleAdamWState
    from ._scale_adamw import scale_adamw as scale_adamw
    from .policies.balance import balance as balance
    from .policies.goodput import goodput_batch as goodput_batch
    from .policies.goodput import goodput_workers as goodput_workers
    from .policies.mitigate_slow_workers import mitigate_slow_workers as mitigate_slow_workers
    from .policies.noise import noise_batch as noise_batch
    from .policies.noise import noise_workers as noise_workers
    from .policies.schedule import schedule as schedule

__getattr__, __dir__ = on_use(
    __name__,
    {
        "published": ".",
        "timing": ".",
        "BatchBranch": "._critical_batch",
        "CriticalBatch": "._critical_batch",
        "measure_critical_batch": "._critical_batch",
        "ScaleByBatchState": "._learning_rate",
        "scale_by_batch": "._learning_rate",
        "ScaleAdamWState": "._scale_adamw",
        "scale_adamw": "._scale_adamw",
        "goodput_batch": ".policies.goodput",
        "goodput_workers": ".policies.goodput",
        "balance": ".policies.balance",
        "mitigate_slow_workers": ".policies.mitigate_slow_workers",
        "noise_batch": ".policies.noise",
        "noise_workers": ".policies.noise",
        "schedule": ".policies.schedule",
    },
)
