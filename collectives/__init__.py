"""Collective operators, and the worlds (MPI, devices, one process) that execute them."""

from typing import TYPE_CHECKING

from adaptive.base.process.on_use import on_use

from ._all_gather import all_gather as all_gather
from ._all_reduce import all_reduce as all_reduce
from ._broadcast import broadcast as broadcast
from ._local_mean import local_mean as local_mean
from .worlds.factory import world as world
from .worlds.launch import LaunchError as LaunchError
from .worlds.launch import LaunchWarning as LaunchWarning
from .worlds.launch import OversubscriptionWarning as OversubscriptionWarning

if TYPE_CHECKING:
    from ._asynchronous_mean import asynchronous_mean as asynchronous_mean
    from ._gather_examples import gather_examples as gather_examples
    from ._islands import by_host as by_host
    from ._neighbor_mean import neighbor_mean as neighbor_mean
    from ._robust import geometric_median as geometric_median
    from ._robust import trimmed_mean as trimmed_mean
    from .worlds.devices import DeviceWorld as DeviceWorld
    from .worlds.jax_world import JaxWorld as JaxWorld
    from .worlds.mpi import MPIWorld as MPIWorld
    from .worlds.solo import SoloWorld as SoloWorld

__getattr__, __dir__ = on_use(
    __name__,
    {
        "asynchronous_mean": "._asynchronous_mean",
        "by_host": "._islands",
        "gather_examples": "._gather_examples",
        "neighbor_mean": "._neighbor_mean",
        "geometric_median": "._robust",
        "trimmed_mean": "._robust",
        "DeviceWorld": ".worlds.devices",
        "JaxWorld": ".worlds.jax_world",
        "MPIWorld": ".worlds.mpi",
        "SoloWorld": ".worlds.solo",
    },
)
