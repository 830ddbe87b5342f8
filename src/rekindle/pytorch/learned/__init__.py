"""Learned plans: record steps, plan repeated ones in the background, and follow the plans.

A program that trains repeats its step. From the second step on, an optimal schedule for it can be
computed while training continues. A later step follows it. This room acts between steps. The native
core acts during steps (`native/steps`).
"""

from rekindle.pytorch.learned._learning import Learning as Learning
from rekindle.pytorch.learned._lessons import lessons_for as lessons_for
from rekindle.pytorch.learned._native import NativeLearner as NativeLearner
