"""The Python side of the native core: build it, start it, call it, and word its errors.

The native core is the runtime in C++ (`src/rekindle/native`). It sees every operator, records
recipes, evicts and recomputes.
"""

from rekindle._public import publish
from rekindle.pytorch.native._core import core as core
from rekindle.pytorch.native._core import remedy as remedy
from rekindle.pytorch.native._core import ship_native_core as ship_native_core
from rekindle.pytorch.native._core import signatures_seen as signatures_seen
from rekindle.pytorch.native._core import what_it_misses as what_it_misses
from rekindle.pytorch.native._core import why_no_native_core as why_no_native_core
from rekindle.pytorch.native._core import why_not as why_not
from rekindle.pytorch.native._driver import Driver as Driver
from rekindle.pytorch.native._driver import Kept as Kept
from rekindle.pytorch.native._driver import Sliced as Sliced
from rekindle.pytorch.native._engine import Numbers as Numbers
from rekindle.pytorch.native._functions import functions_recomputed as functions_recomputed
from rekindle.pytorch.native._functions import recomputable as recomputable
from rekindle.pytorch.native._higher import hidden as hidden
from rekindle.pytorch.native._higher import is_seen as is_seen
from rekindle.pytorch.native._module import Core as Core
from rekindle.pytorch.native._module import Handle as Handle
from rekindle.pytorch.native._module import RouteNumbers as RouteNumbers
from rekindle.pytorch.native._module import backward_node as backward_node
from rekindle.pytorch.native._runtime import Runtime as Runtime
from rekindle.pytorch.native._runtime import interrupts_kept as interrupts_kept
from rekindle.pytorch.native._runtime import seen as seen
from rekindle.pytorch.native._runtime import seen_in_thread as seen_in_thread
from rekindle.pytorch.native._states import random_states_counted as random_states_counted
from rekindle.pytorch.native._steps import SHOWN as SHOWN
from rekindle.pytorch.native._steps import Step as Step
from rekindle.pytorch.native._steps import Steps as Steps
from rekindle.pytorch.native._transcript import Recording as Recording
from rekindle.pytorch.native._transcript import Transcript as Transcript
from rekindle.pytorch.native._workspaces import workspaces_kept as workspaces_kept

publish("rekindle", [Step])
