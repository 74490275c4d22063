"""The library's exceptions.

`DriverError`, `DataError`, `BatchSizeError`, `WorkerCountError`, `CheckpointError` and `RecordError` are also
`ValueError`s.
"""

from __future__ import annotations


class AdaptiveError(Exception):
    """Base class of the library's exceptions."""


class DriverError(AdaptiveError, ValueError):
    """The driver program cannot be run as written."""


class ReplicationError(DriverError):
    """A value that must be equal on all workers can differ between them."""


class CollectiveError(DriverError):
    """A collective, source, operator state or hook is misplaced, or has an invalid operand."""


class DataError(AdaptiveError, ValueError):
    """The data set, or a batch of it, is invalid."""


class BatchSizeError(AdaptiveError, ValueError):
    """An invalid global batch, or an invalid split of it over the workers."""


class WorkerCountError(AdaptiveError, ValueError):
    """An invalid number of workers."""


class CheckpointError(AdaptiveError, ValueError):
    """A checkpoint that is damaged, belongs to another program, or cannot be written."""


class RecordError(AdaptiveError, ValueError):
    """A file that isn't a valid record of a run, or a record that lacks a requested field."""


class DisagreementError(AdaptiveError):
    """Workers differ in a value that must be equal on all of them."""


class NonFiniteError(AdaptiveError):
    """A reduced value, or an update computed from it, is not finite."""


class OutOfMemoryError(AdaptiveError):
    """Memory ran out in a step that cannot be taken again."""


class ReserveReleased(SystemExit):
    """Exit of a process in reserve with status 0, because the workers have left the world's block."""

    def __init__(self) -> None:
        super().__init__(0)


class Preempted(SystemExit):
    """Exit of a process that received SIGTERM or SIGUSR1; a script that doesn't catch it ends.

    Raised by `program.run` and `program.step`. If all processes leave: on every process, after the last checkpoint is
    written (if the run keeps checkpoints). If this process leaves alone: after the others continue without it; its
    world is closed by then, so it can take part in no further collective.

    Attributes:
      code: exit status: 143, as after SIGTERM; 0 if it leaves alone, since the job continues.
      alone: whether the other processes continue.
    """

    def __init__(self, why: str, *, alone: bool = False):
        super().__init__(why)
        self.alone = alone
        self.code: int = 0 if alone else 143


class WorkerError(AdaptiveError):
    """Another worker failed, and this one stopped too."""
