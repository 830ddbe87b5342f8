"""The second step knows the first: steps written down, planned in the background, followed."""

from rekindle.pytorch.learned._learning import Learning as Learning
from rekindle.pytorch.learned._lessons import lessons_for as lessons_for
from rekindle.pytorch.learned._native import NativeLearner as NativeLearner
