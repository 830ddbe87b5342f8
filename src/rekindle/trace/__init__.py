"""Traces of programs: frozen data, the rules of a valid trace, a builder, and synthetic traces.

A trace records the operators that a program runs, with their sizes and times, and when the program
frees each value.
"""

from rekindle._public import publish
from rekindle.trace._builder import TraceBuilder as TraceBuilder
from rekindle.trace._in_place import taking_over as taking_over
from rekindle.trace._liveness import keep_all_peak as keep_all_peak
from rekindle.trace._liveness import largest_need as largest_need
from rekindle.trace._liveness import neediest as neediest
from rekindle.trace._model import Call as Call
from rekindle.trace._model import Drop as Drop
from rekindle.trace._model import Event as Event
from rekindle.trace._model import Op as Op
from rekindle.trace._model import Pin as Pin
from rekindle.trace._model import Release as Release
from rekindle.trace._model import Retain as Retain
from rekindle.trace._model import Trace as Trace
from rekindle.trace._model import Use as Use
from rekindle.trace._rules import RULES as RULES
from rekindle.trace._rules import check_trace as check_trace
from rekindle.trace._synthetic import chain as chain

publish(__name__, globals().values())
