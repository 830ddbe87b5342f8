"""The online engine: it gets the events of a running program, and decides what to evict.

`Engine` implements Dynamic Tensor Rematerialization (DTR). It imports no torch, reads no clock and
does no I/O. The simulator drives it with recorded events, and `native/engine` does the same in C++,
action by action.
"""

from rekindle.engine._engine import Engine as Engine
from rekindle.engine._follower import Follower as Follower
from rekindle.engine._follower import Host as Host
from rekindle.engine._frame import NoRoom as NoRoom
from rekindle.engine._frame import Thrashed as Thrashed
from rekindle.engine._graph import Call as Call
from rekindle.engine._graph import Storage as Storage
from rekindle.engine._graph import Value as Value
from rekindle.engine._route import Route as Route
