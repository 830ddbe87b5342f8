"""What the program's own variables hold may go as well: `evict="anything"`."""

from rekindle.pytorch.held._anything import Anything as Anything
from rekindle.pytorch.held._anything import Touching as Touching
from rekindle.pytorch.held._anything import anything as anything
from rekindle.pytorch.held._husk import flag_of_reading as flag_of_reading
from rekindle.pytorch.held._threads import OURS as OURS
