"""What an operator may add to a traced driver: sources, collectives, operator state, hooks, claims.

Each is a JAX primitive, so a driver that uses them is an ordinary JAX dataflow graph. That they stand in the graph as
equations, and not in some list beside it, is what makes nested `jax.jit`s, `jax.grad` and re-tracing for another batch
size work with no care taken: whatever JAX does with a function, the graph that comes out says the same.

Outside a program they execute eagerly: a source reads as its stand-in, a collective is carried out by the world that
was entered last (by nobody, where there is none: one worker), operator state is not kept, and
hooks and claims are passed by. So `print` and `pdb` work in a driver.
"""

from .collectives import collective as collective
from .hooks import Hook as Hook
from .hooks import hook as hook
from .operator_state import operator_state as operator_state
from .replication_claims import assert_scope as assert_scope
from .sources import Reading as Reading
from .sources import Source as Source
from .sources import read as read
