"""Let the steps of optimizers within a budget happen as a whole or not at all."""

from rekindle.pytorch.optimizers._optimizer_steps import OptimizerSteps as OptimizerSteps
