"""The operators of a driver: sources, collectives, operator state, hooks and claims.

Each is a JAX primitive, so a driver that uses them is an ordinary JAX dataflow graph. Because operators are equations
of the graph, and not entries of a list beside it, they survive nested `jax.jit`s, `jax.grad` and tracing for another
batch size.

Outside a program they run eagerly: a source returns its stand-in, a collective runs in the world that was entered last
(without a world: on one worker), operator state is not kept, and hooks and claims do nothing. So `print` and `pdb` work
in a driver.
"""

from .collectives import collective as collective
from .hooks import Hook as Hook
from .hooks import hook as hook
from .operator_state import operator_state as operator_state
from .replication_claims import assert_scope as assert_scope
from .sources import Reading as Reading
from .sources import Source as Source
from .sources import read as read
