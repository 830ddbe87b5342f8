"""Plan a model before training, by a graph of its forward and backward pass.

The planned schedule says what to evict and recompute. The graph is split into a forward and a
backward part that follow the schedule, and the parts run eagerly or are compiled.
"""

from rekindle._public import publish
from rekindle.pytorch.planned._backend import Backend as Backend
from rekindle.pytorch.planned._export import Export as Export
from rekindle.pytorch.planned._export import candidates as candidates
from rekindle.pytorch.planned._planned import ModelPlan as ModelPlan
from rekindle.pytorch.planned._planned import open_host as open_host
from rekindle.pytorch.planned._planned import plan_model as plan_model
from rekindle.pytorch.planned._planned import training_step as training_step
from rekindle.pytorch.planned._refused import checked as checked

publish("rekindle", [Export, ModelPlan])
