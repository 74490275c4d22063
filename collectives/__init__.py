"""Collective operators, and the worlds that carry them out."""

from ._devices import DeviceWorld as DeviceWorld
from ._launch import LaunchError as LaunchError
from ._mpi import MPIWorld as MPIWorld
from ._ops import all_gather as all_gather
from ._ops import all_reduce as all_reduce
from ._ops import broadcast as broadcast
from ._pick import world as world
from ._solo import SoloWorld as SoloWorld
from ._threads import OversubscriptionWarning as OversubscriptionWarning
