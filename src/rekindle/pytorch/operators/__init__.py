"""Properties of PyTorch's operators, call signatures, compiled regions, and error texts.

The native core gets the tables of properties as data (`traits`). Rehearsals and dry runs use
`Operator` and `Signature`, because they run operators on fake tensors, without the native core.
"""

from rekindle.pytorch.operators._doubtful import doubt_of as doubt_of
from rekindle.pytorch.operators._doubtful import may_differ as may_differ
from rekindle.pytorch.operators._fingerprint import Fingerprint as Fingerprint
from rekindle.pytorch.operators._fingerprint import fingerprint_of as fingerprint_of
from rekindle.pytorch.operators._fingerprint import fingerprint_of_memory as fingerprint_of_memory
from rekindle.pytorch.operators._imports import when_imported as when_imported
from rekindle.pytorch.operators._in_place import IN_PLACE as IN_PLACE
from rekindle.pytorch.operators._in_place import BackwardNode as BackwardNode
from rekindle.pytorch.operators._in_place import InPlace as InPlace
from rekindle.pytorch.operators._in_place import may_take_over as may_take_over
from rekindle.pytorch.operators._operators import EFFECTS as EFFECTS
from rekindle.pytorch.operators._operators import FUNCTIONAL as FUNCTIONAL
from rekindle.pytorch.operators._operators import OWN as OWN
from rekindle.pytorch.operators._operators import ROOMY_ON_HOST as ROOMY_ON_HOST
from rekindle.pytorch.operators._operators import ROUTING as ROUTING
from rekindle.pytorch.operators._operators import SUMS_OF_PRODUCTS as SUMS_OF_PRODUCTS
from rekindle.pytorch.operators._operators import UNTAGGED_RANDOM as UNTAGGED_RANDOM
from rekindle.pytorch.operators._operators import Operator as Operator
from rekindle.pytorch.operators._operators import is_roomy_on_host as is_roomy_on_host
from rekindle.pytorch.operators._operators import operator as operator
from rekindle.pytorch.operators._operators import unseen_collective as unseen_collective
from rekindle.pytorch.operators._plain_kernels import plain_kernels as plain_kernels
from rekindle.pytorch.operators._random import generator_of as generator_of
from rekindle.pytorch.operators._refusals import changed_size as changed_size
from rekindle.pytorch.operators._refusals import collective_in_replay as collective_in_replay
from rekindle.pytorch.operators._refusals import foreign_input as foreign_input
from rekindle.pytorch.operators._refusals import gathered_input as gathered_input
from rekindle.pytorch.operators._refusals import lost_value as lost_value
from rekindle.pytorch.operators._refusals import modified_input as modified_input
from rekindle.pytorch.operators._refusals import recomputed_in_a_graph as recomputed_in_a_graph
from rekindle.pytorch.operators._refusals import resized_input as resized_input
from rekindle.pytorch.operators._regions import COMPILED as COMPILED
from rekindle.pytorch.operators._regions import REGION as REGION
from rekindle.pytorch.operators._regions import Region as Region
from rekindle.pytorch.operators._regions import region_of as region_of
from rekindle.pytorch.operators._regions import regions_shown as regions_shown
from rekindle.pytorch.operators._signature import PLAIN_TENSORS as PLAIN_TENSORS
from rekindle.pytorch.operators._signature import STRIDED as STRIDED
from rekindle.pytorch.operators._signature import Invocation as Invocation
from rekindle.pytorch.operators._signature import Place as Place
from rekindle.pytorch.operators._signature import Signature as Signature
from rekindle.pytorch.operators._signature import is_plain as is_plain
from rekindle.pytorch.operators._signature import signature_of as signature_of
from rekindle.pytorch.operators._signature import tensors_in as tensors_in
from rekindle.pytorch.operators._signature import written_by as written_by
from rekindle.pytorch.operators._switches import kernels_in_words as kernels_in_words
from rekindle.pytorch.operators._traits import TRIED as TRIED
from rekindle.pytorch.operators._traits import traits as traits
