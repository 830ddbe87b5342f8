"""Learned plans: record steps, plan repeated ones in the background, and follow the plans.

A program that trains repeats its step. Once two steps have run the same operators, a schedule for
such steps is computed while training continues. Later steps follow the schedule. This package acts
between steps. The native core acts during steps (`native/steps`).
"""

from rekindle.pytorch.learned._learner import Learner as Learner
from rekindle.pytorch.learned._step_plans import plans_for as plans_for
