"""What a person writes an own monitor, collective, policy or world with.

Drivers need only `adaptive`, `collectives`, `monitors` and `controllers`. The classes that policies meet (`Decision`,
`Observation`, `Limits`) and the `World` protocol are in `adaptive`.

* A **monitor** reads `Source`s, keeps `operator_state`, and checks with `assert_scope` that arguments are local or
  replicated.
* A **collective** is a subclass of `Collective`, applied by `collective`.
* A **world** implements `ad.World`: it reduces the parts of a message over the workers.
* A **hook** calls a `Handler` with values of the driver; `controllers.hook` makes handlers from functions and policies.
* A **listener** is called with a `StepEvent` after each step: `program.subscribe(listener)`.
* `read_run` reads the **record** of a run, written by `program.run(record=…)`.
"""

from adaptive.base.activity import WorkerSeconds as WorkerSeconds
from adaptive.base.channel import Channel as Channel
from adaptive.base.channel import PartSpec as PartSpec
from adaptive.base.channel import SentMessage as SentMessage
from adaptive.base.decision import Handler as Handler
from adaptive.base.errors import RecordError as RecordError
from adaptive.base.reductions import Mixed as Mixed
from adaptive.base.reductions import Reduction as Reduction
from adaptive.base.reductions import Sliced as Sliced
from adaptive.base.worker_slots import WorkerSlots as WorkerSlots
from adaptive.base.world import Loss as Loss
from adaptive.base.world import MembersChanged as MembersChanged
from adaptive.observe.events import HookValues as HookValues
from adaptive.observe.events import StepEvent as StepEvent
from adaptive.observe.reader import RecordedRun as RecordedRun
from adaptive.observe.reader import read_run as read_run
from adaptive.operators.collectives import Collective as Collective
from adaptive.operators.collectives import collective as collective
from adaptive.operators.hooks import hook as hook
from adaptive.operators.operator_state import operator_state as operator_state
from adaptive.operators.replication_claims import assert_mean as assert_mean
from adaptive.operators.replication_claims import assert_scope as assert_scope
from adaptive.operators.sources import EXAMPLES as EXAMPLES
from adaptive.operators.sources import GLOBAL_BATCH as GLOBAL_BATCH
from adaptive.operators.sources import MICROBATCHES as MICROBATCHES
from adaptive.operators.sources import Reading as Reading
from adaptive.operators.sources import Source as Source
from adaptive.operators.sources import read as read
from adaptive.runtime.kernels.cache import share_compilations as share_compilations
