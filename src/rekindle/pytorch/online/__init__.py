"""The Python side of one run within a budget.

The native core (C++) handles operators, tensors and saved values. This package handles what happens
around operators: which module owns which memory, source lines of the program, and texts of errors.
"""

from rekindle.pytorch.online._budget_history import too_small as too_small
from rekindle.pytorch.online._calls import ModelCall as ModelCall
from rekindle.pytorch.online._calls import Shape as Shape
from rekindle.pytorch.online._calls import interrupted_call as interrupted_call
from rekindle.pytorch.online._contents import PutBack as PutBack
from rekindle.pytorch.online._contents import keep_generators as keep_generators
from rekindle.pytorch.online._contents import put_back as put_back
from rekindle.pytorch.online._device import device_of as device_of
from rekindle.pytorch.online._device import device_of_program as device_of_program
from rekindle.pytorch.online._device import elsewhere as elsewhere
from rekindle.pytorch.online._device import same_device as same_device
from rekindle.pytorch.online._explain import CATEGORIES as CATEGORIES
from rekindle.pytorch.online._explain import FOR_KEPT as FOR_KEPT
from rekindle.pytorch.online._explain import GRADIENTS as GRADIENTS
from rekindle.pytorch.online._explain import IN_USE as IN_USE
from rekindle.pytorch.online._explain import INPUTS as INPUTS
from rekindle.pytorch.online._explain import KEPT as KEPT
from rekindle.pytorch.online._explain import OPTIMIZER as OPTIMIZER
from rekindle.pytorch.online._explain import PARAMETERS as PARAMETERS
from rekindle.pytorch.online._explain import PROGRAM as PROGRAM
from rekindle.pytorch.online._explain import SAVED as SAVED
from rekindle.pytorch.online._explain import UNRECORDED as UNRECORDED
from rekindle.pytorch.online._explain import WAITING as WAITING
from rekindle.pytorch.online._explain import Holder as Holder
from rekindle.pytorch.online._explain import Snapshot as Snapshot
from rekindle.pytorch.online._explain import out_of_budget as out_of_budget
from rekindle.pytorch.online._explain import out_of_memory as out_of_memory
from rekindle.pytorch.online._explain import table_of as table_of
from rekindle.pytorch.online._fsdp import InterruptedPasses as InterruptedPasses
from rekindle.pytorch.online._fsdp import reset_interrupted as reset_interrupted
from rekindle.pytorch.online._handed_out import CAPSULES as CAPSULES
from rekindle.pytorch.online._handed_out import Current as Current
from rekindle.pytorch.online._handed_out import by_rekindle as by_rekindle
from rekindle.pytorch.online._handed_out import exported as exported
from rekindle.pytorch.online._handed_out import hand_out as hand_out
from rekindle.pytorch.online._handed_out import handing_out_seen as handing_out_seen
from rekindle.pytorch.online._handed_out import not_traced as not_traced
from rekindle.pytorch.online._handed_out import perhaps_written as perhaps_written
from rekindle.pytorch.online._handed_out import replace as replace
from rekindle.pytorch.online._leaves import leaves as leaves
from rekindle.pytorch.online._owners import Owners as Owners
from rekindle.pytorch.online._owners import memory_of as memory_of
from rekindle.pytorch.online._places import OUTSIDE as OUTSIDE
from rekindle.pytorch.online._places import Place as Place
from rekindle.pytorch.online._places import Places as Places
from rekindle.pytorch.online._places import Site as Site
from rekindle.pytorch.online._resize import resizes_seen as resizes_seen
from rekindle.pytorch.online._selective import must_saves_seen as must_saves_seen
from rekindle.pytorch.online._trade import trades_seen as trades_seen
from rekindle.pytorch.online._users_line import line_in_words as line_in_words
from rekindle.pytorch.online._users_line import owner_of_file as owner_of_file
from rekindle.pytorch.online._users_line import users_line as users_line
from rekindle.pytorch.online._warm import WarmOptimizers as WarmOptimizers
