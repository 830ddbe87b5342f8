"""`with rekindle.budget(...)`: the context that opens a budget, and the report of a run."""

from rekindle.pytorch.context._amount import Amount as Amount
from rekindle.pytorch.context._budget import budget as budget
from rekindle.pytorch.context._budget import never_recompute as never_recompute
from rekindle.pytorch.context._environment import Environment as Environment
from rekindle.pytorch.context._environment import environment as environment
from rekindle.pytorch.context._run import Run as Run
