"""The API for extensions: own worlds, collectives, monitors and policies, and tools around a run.

`collectives`, `monitors` and `controllers` use only `adaptive` and this module, so another package can do the same as
these three. This API is less stable than the API for drivers: it may change between minor versions, with an entry in
the changelog.

* A **monitor** reads `Source`s, keeps `operator_state`, and checks with `assert_scope` that arguments are local or
  replicated.
* A **collective** is a subclass of `Collective`, applied by `collective`. A **world** implements `World`, and
  optionally `OffersMailboxes`, `OffersMesh` and `ProbesLinks`.
* A **policy** is a pair of functions from an `Observation` to a `Decision`; a `hook` calls a `Handler`.
* A **listener** is called with a `StepEvent` after each step: `program.subscribe(listener)`.
* `read_run` reads the **record** of a run, written by `program.run(record=…)`.
* A **simulator** runs `Hooks`, `BatchSizes` and `Membership`, which merge, clip and apply decisions as a program does.
  Its `Readiness` says when sizes can be made, and its `WorkerSlots` which workers are available.
"""

from adaptive.base.activity import Breakdown as Breakdown
from adaptive.base.activity import WorkerSeconds as WorkerSeconds
from adaptive.base.arrays import NotAnArrayError as NotAnArrayError
from adaptive.base.arrays import as_jax as as_jax
from adaptive.base.arrays import is_key as is_key
from adaptive.base.channel import Arrived as Arrived
from adaptive.base.channel import Arriving as Arriving
from adaptive.base.channel import Blocking as Blocking
from adaptive.base.channel import Channel as Channel
from adaptive.base.channel import Channels as Channels
from adaptive.base.channel import LoneChannel as LoneChannel
from adaptive.base.channel import LookAtPiece as LookAtPiece
from adaptive.base.channel import Parts as Parts
from adaptive.base.channel import PartSpec as PartSpec
from adaptive.base.channel import WhenWaitedFor as WhenWaitedFor
from adaptive.base.cores import allowed_cpus as allowed_cpus
from adaptive.base.cores import chosen_threads as chosen_threads
from adaptive.base.current import current_world as current_world
from adaptive.base.current import enter as enter
from adaptive.base.current import leave as leave
from adaptive.base.decision import Decision as Decision
from adaptive.base.decision import Handler as Handler
from adaptive.base.decision import Limits as Limits
from adaptive.base.decision import Observation as Observation
from adaptive.base.errors import RecordError as RecordError
from adaptive.base.exit_hooks import register_exit_hook as register_exit_hook
from adaptive.base.exit_hooks import run_exit_hooks as run_exit_hooks
from adaptive.base.failure import FAILURE_THREAD as FAILURE_THREAD
from adaptive.base.failure import report_failure as report_failure
from adaptive.base.host_memory import MemoryLeft as MemoryLeft
from adaptive.base.jaxprs import bind as bind
from adaptive.base.jaxprs import called as called
from adaptive.base.launcher import launcher as launcher
from adaptive.base.launcher import tasks_not_started as tasks_not_started
from adaptive.base.link_probe import LinkProbe as LinkProbe
from adaptive.base.link_probe import ProbesLinks as ProbesLinks
from adaptive.base.link_probe import no_links as no_links
from adaptive.base.mailbox import LocalMailboxes as LocalMailboxes
from adaptive.base.mailbox import Mailbox as Mailbox
from adaptive.base.mailbox import OffersMailboxes as OffersMailboxes
from adaptive.base.mailbox import Vectors as Vectors
from adaptive.base.numbers import brief as brief
from adaptive.base.numbers import real as real
from adaptive.base.numbers import reals as reals
from adaptive.base.numbers import whole as whole
from adaptive.base.on_use import on_use as on_use
from adaptive.base.python_stacks import SECONDS_TO_WRITE as SECONDS_TO_WRITE
from adaptive.base.python_stacks import shortened as shortened
from adaptive.base.python_stacks import stack_of as stack_of
from adaptive.base.python_stacks import write_stacks_upon_signal as write_stacks_upon_signal
from adaptive.base.python_stacks import written_stacks as written_stacks
from adaptive.base.reductions import Gathered as Gathered
from adaptive.base.reductions import Mixed as Mixed
from adaptive.base.reductions import Reduction as Reduction
from adaptive.base.reductions import Sliced as Sliced
from adaptive.base.reductions import average as average
from adaptive.base.reductions import summed_statistics as summed_statistics
from adaptive.base.roster import with_same_members as with_same_members
from adaptive.base.signals import SignalHandlers as SignalHandlers
from adaptive.base.signals import acknowledge_termination as acknowledge_termination
from adaptive.base.signals import pending_termination as pending_termination
from adaptive.base.source_lines import at as at
from adaptive.base.source_lines import current_line as current_line
from adaptive.base.source_lines import line_of as line_of
from adaptive.base.thread_status import IN_A_STEP as IN_A_STEP
from adaptive.base.thread_status import ThreadStatus as ThreadStatus
from adaptive.base.thread_status import thread_status as thread_status
from adaptive.base.thread_status import thread_status_of as thread_status_of
from adaptive.base.waits import Wait as Wait
from adaptive.base.waits import wait_of as wait_of
from adaptive.base.waits import waiting as waiting
from adaptive.base.worker_mesh import OffersMesh as OffersMesh
from adaptive.base.worker_mesh import WorkerMesh as WorkerMesh
from adaptive.base.worker_slots import FixedMembership as FixedMembership
from adaptive.base.worker_slots import WorkerSlots as WorkerSlots
from adaptive.base.worker_slots import number_of_workers as number_of_workers
from adaptive.base.world import World as World
from adaptive.base.world_members import Loss as Loss
from adaptive.base.world_members import TransferPayload as TransferPayload
from adaptive.base.world_members import WorldMembers as WorldMembers
from adaptive.base.world_messages import MembersChanged as MembersChanged
from adaptive.base.world_messages import WorldMessages as WorldMessages
from adaptive.control.batch_sizes import BatchSizes as BatchSizes
from adaptive.control.decisions import apply_decision as apply_decision
from adaptive.control.hooks import Hooks as Hooks
from adaptive.control.hosts import this_host as this_host
from adaptive.control.hyperparameters import checked_hyperparameters as checked_hyperparameters
from adaptive.control.membership import Membership as Membership
from adaptive.control.readiness import Readiness as Readiness
from adaptive.control.slot_reset import reset_slots as reset_slots
from adaptive.control.split import check_shares as check_shares
from adaptive.control.split import split as split
from adaptive.graph.plan import HookPlan as HookPlan
from adaptive.observe.events import HookValues as HookValues
from adaptive.observe.events import Listener as Listener
from adaptive.observe.events import StepEvent as StepEvent
from adaptive.observe.events import Subscription as Subscription
from adaptive.observe.events import Unsubscribe as Unsubscribe
from adaptive.observe.record import RECORD_VERSION as RECORD_VERSION
from adaptive.observe.recorded import RecordedRun as RecordedRun
from adaptive.observe.recorded import read_parts as read_parts
from adaptive.observe.recorded import read_run as read_run
from adaptive.operators.collectives import Collective as Collective
from adaptive.operators.collectives import collective as collective
from adaptive.operators.context import tracing as tracing
from adaptive.operators.hooks import Hook as Hook
from adaptive.operators.hooks import hook as hook
from adaptive.operators.operator_state import operator_state as operator_state
from adaptive.operators.peer_read import SCHEDULES as SCHEDULES
from adaptive.operators.peer_read import read_peer as read_peer
from adaptive.operators.replication_claims import assert_mean as assert_mean
from adaptive.operators.replication_claims import assert_scope as assert_scope
from adaptive.operators.round_clock import takes_another_step as takes_another_step
from adaptive.operators.sources import EXAMPLES as EXAMPLES
from adaptive.operators.sources import GLOBAL_BATCH as GLOBAL_BATCH
from adaptive.operators.sources import MICROBATCHES as MICROBATCHES
from adaptive.operators.sources import Reading as Reading
from adaptive.operators.sources import Source as Source
from adaptive.operators.sources import read as read
from adaptive.runtime.cache import share_compilations as share_compilations
