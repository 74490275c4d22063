"""Adaptive control for data-parallel training in JAX: batches that follow the noise scale and the speed of each worker.

This package traces and runs programs. `collectives`, `monitors` and `controllers` add collectives and worlds (MPI among
them), monitors and policies.
"""

from typing import TYPE_CHECKING

from . import data as data
from . import log as log
from .base.decision import Decision as Decision
from .base.decision import Limits as Limits
from .base.decision import Observation as Observation
from .base.errors import AdaptiveError as AdaptiveError
from .base.errors import BatchSizeError as BatchSizeError
from .base.errors import CheckpointError as CheckpointError
from .base.errors import CollectiveError as CollectiveError
from .base.errors import DataError as DataError
from .base.errors import DisagreementError as DisagreementError
from .base.errors import DriverError as DriverError
from .base.errors import NonFiniteError as NonFiniteError
from .base.errors import OutOfMemoryError as OutOfMemoryError
from .base.errors import Preempted as Preempted
from .base.errors import ReplicationError as ReplicationError
from .base.errors import ReserveReleased as ReserveReleased
from .base.errors import WorkerCountError as WorkerCountError
from .base.errors import WorkerError as WorkerError
from .base.process.on_use import on_use
from .base.world import World as World
from .data.rows import Shards as Shards
from .observe.report import Report as Report
from .operators.batch_key import batch_key as batch_key
from .operators.hyperparameters import hyperparameter as hyperparameter
from .operators.minibatches import minibatches as minibatches
from .operators.values import batch_size as batch_size
from .operators.values import capacity as capacity
from .operators.values import example_keys as example_keys
from .operators.values import global_batch as global_batch
from .operators.values import microbatch_size as microbatch_size
from .operators.values import num_workers as num_workers
from .operators.values import replicated as replicated
from .operators.values import step_key as step_key
from .operators.values import step_number as step_number
from .operators.values import worker_index as worker_index
from .program.program import Program as Program

if TYPE_CHECKING:
    from .check.verdict import Invariance as Invariance
    from .program.checkpoints import Checkpoints as Checkpoints

__getattr__, __dir__ = on_use(
    __name__,
    {
        "Invariance": ".check.verdict",
        "Checkpoints": ".program.checkpoints",
    },
)

__version__ = "0.1.0"
