"""`with rekindle.budget(...)`: the context that opens a budget, and the report of a run."""

from rekindle.pytorch.context._auto import amount_of as amount_of
from rekindle.pytorch.context._auto import available as available
from rekindle.pytorch.context._auto import is_auto as is_auto
from rekindle.pytorch.context._auto import resolved as resolved
from rekindle.pytorch.context._budget import budget as budget
from rekindle.pytorch.context._budget import never_recompute as never_recompute
from rekindle.pytorch.context._environment import Environment as Environment
from rekindle.pytorch.context._environment import environment as environment
from rekindle.pytorch.context._run import Run as Run
