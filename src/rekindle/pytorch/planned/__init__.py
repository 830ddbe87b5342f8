"""Plan ahead of time: split a model's forward-backward graph by a schedule; run or compile it."""

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
