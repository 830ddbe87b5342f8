"""Find live tensors and their storages, read shapes and strides, and count bytes."""

from rekindle.pytorch.tensors._geometry import COMPLEX as COMPLEX
from rekindle.pytorch.tensors._geometry import MOST_KEPT as MOST_KEPT
from rekindle.pytorch.tensors._geometry import Geometry as Geometry
from rekindle.pytorch.tensors._geometry import geometries as geometries
from rekindle.pytorch.tensors._geometry import geometry_of as geometry_of
from rekindle.pytorch.tensors._geometry import new_geometry as new_geometry
from rekindle.pytorch.tensors._geometry import requiring_grad as requiring_grad
from rekindle.pytorch.tensors._living import homes_of as homes_of
from rekindle.pytorch.tensors._living import living_objects as living_objects
from rekindle.pytorch.tensors._living import living_tensors as living_tensors
from rekindle.pytorch.tensors._living import parts_of as parts_of
from rekindle.pytorch.tensors._memory import EXOTIC as EXOTIC
from rekindle.pytorch.tensors._memory import UNWRITTEN as UNWRITTEN
from rekindle.pytorch.tensors._memory import ZEROED as ZEROED
from rekindle.pytorch.tensors._memory import whole as whole
from rekindle.pytorch.tensors._meter import Meter as Meter
from rekindle.pytorch.tensors._meter import bytes_of as bytes_of
from rekindle.pytorch.tensors._meter import tensors_of as tensors_of
from rekindle.pytorch.tensors._private import privately as privately
from rekindle.pytorch.tensors._private import sees as sees
