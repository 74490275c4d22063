"""What can go wrong, as one tree of exceptions.

    AdaptiveError
    ├── DriverError             the driver cannot be run as written; found when the program is built
    │   ├── ReplicationError    a value that must be equal on all workers can differ between them
    │   └── CollectiveError     an operator stands where it cannot, or is given what it cannot take
    ├── DataError               the data set or a batch cannot be used
    ├── BatchSizeError          a global batch or a split of it that cannot be
    ├── WorkerCountError            a number of workers that cannot be
    ├── CheckpointError         a checkpoint that is damaged, or of another program, or cannot be kept
    ├── DisagreementError       workers differ in what must be equal: driver, data, state, a decision
    ├── NonFiniteError          what all_reduce brings, or an update makes of it, is not finite
    └── WorkerError             another worker failed, and this one stopped with it

`DriverError`, `DataError`, `BatchSizeError`, `WorkerCountError`, `CheckpointError` and `RecordError` are also
`ValueError`s.
"""

from __future__ import annotations


class AdaptiveError(Exception):
    """The base of every error that this library raises on purpose."""


class DriverError(AdaptiveError, ValueError):
    """The driver program cannot be run as written."""


class ReplicationError(DriverError):
    """A value that must be equal on all workers can differ between them."""


class CollectiveError(DriverError):
    """A collective, source, operator state or hook stands where it cannot, or is given what it cannot take."""


class DataError(AdaptiveError, ValueError):
    """The data set, or a batch of it, cannot be used."""


class BatchSizeError(AdaptiveError, ValueError):
    """A global batch, or a split of it over the workers, that cannot be."""


class WorkerCountError(AdaptiveError, ValueError):
    """A number of workers that cannot be."""


class CheckpointError(AdaptiveError, ValueError):
    """A checkpoint that cannot be restored, since it is damaged or of another program, or that cannot be kept."""


class RecordError(AdaptiveError, ValueError):
    """A file that is no record of a run, or a record that does not hold what is asked of it."""


class DisagreementError(AdaptiveError):
    """Workers differ in something that must be equal on all of them."""


class NonFiniteError(AdaptiveError):
    """What `all_reduce` brings, or what an update makes of it, is not finite."""


class ReserveReleased(SystemExit):
    """This process was in reserve, and is needed no more: the workers have left the world's block. It ends, with 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Preempted(SystemExit):
    """This process was told to go (SIGTERM, SIGUSR1), and goes: a script that does not catch it ends.

    Raised by `program.run` and `program.step`. Where all go, when the last state is on the disk (if the run keeps
    checkpoints); on every process. Where this one goes alone, when the others have taken leave of it: its world is
    closed by then, and nothing can be done together with the others.

    Attributes:
      code: what Python ends with: 143, as of whoever is ended by SIGTERM; 0 where it goes alone, since the job goes on.
      alone: whether the others go on.
    """

    def __init__(self, why: str, *, alone: bool = False):
        super().__init__(why)
        self.alone = alone
        self.code: int = 0 if alone else 143


class WorkerError(AdaptiveError):
    """Another worker failed, and this one stopped with it."""
