"""Adaptive control for data-parallel training in JAX: batches that follow the noise scale and the speed of each worker.

The trunk: what a driver program is, and how it runs. It knows no MPI, no monitor and no policy; those live in
`collectives`, `monitors` and `controllers`.
"""

from ._check import Invariance as Invariance
from ._decision import Decision as Decision
from ._decision import Limits as Limits
from ._decision import Observation as Observation
from ._errors import AdaptiveError as AdaptiveError
from ._errors import BatchSizeError as BatchSizeError
from ._errors import CheckpointError as CheckpointError
from ._errors import CollectiveError as CollectiveError
from ._errors import DataError as DataError
from ._errors import DisagreementError as DisagreementError
from ._errors import DriverError as DriverError
from ._errors import NonFiniteError as NonFiniteError
from ._errors import ReplicationError as ReplicationError
from ._errors import WorkerError as WorkerError
from ._minibatches import minibatches as minibatches
from ._program import Program as Program
from ._report import Report as Report
from ._shards import Shards as Shards
from ._values import batch_size as batch_size
from ._values import example_keys as example_keys
from ._values import global_batch as global_batch
from ._values import microbatch_size as microbatch_size
from ._values import replicated as replicated
from ._values import step as step
from ._values import step_key as step_key
from ._values import worker as worker
from ._values import workers as workers
from ._world import World as World

__version__ = "0.1.0"
