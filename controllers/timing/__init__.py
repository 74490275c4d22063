"""Models of step time, exact allocations of a batch to workers, and curves of efficiency: what policies are made of."""

from ._allocate import allocate as allocate
from ._batch_time import BatchTime as BatchTime
from ._efficiency import efficiency as efficiency
from ._time_model import TimeModel as TimeModel
