"""`with rekindle.budget(...)`: the context that puts the rooms together, and what it tells."""

from rekindle.pytorch.context._auto import amount_of as amount_of
from rekindle.pytorch.context._budget import Run as Run
from rekindle.pytorch.context._budget import budget as budget
from rekindle.pytorch.context._budget import never_recompute as never_recompute
from rekindle.pytorch.context._options import device_of as device_of
