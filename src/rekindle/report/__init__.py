"""Reports of runs and profiles as text, plots, pages and JSON.

Other packages pass plain data to this package, which measures nothing. Only `_plot.py` imports
matplotlib.
"""

from rekindle._public import publish
from rekindle.report._data import Choice as Choice
from rekindle.report._data import Holders as Holders
from rekindle.report._data import Recomputed as Recomputed
from rekindle.report._data import Timeline as Timeline
from rekindle.report._profile import Profile as Profile
from rekindle.report._report import Report as Report

publish(__name__, globals().values())
