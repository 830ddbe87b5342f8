"""Record training steps, plan repeated steps in the background, and follow the plans.

A program that trains repeats its step. Once two steps have run the same operators, a plan for such
steps is made while training continues. The plan says when to evict and to recompute which values.
Later steps follow the plan. This package acts between steps. The native core acts during steps
(`native/steps`).
"""

from rekindle.pytorch.learned._learner import Learner as Learner
from rekindle.pytorch.learned._step_plans import plans_for as plans_for
