"""Models of allocators, which stand between tensors and the memory of a CUDA device."""

from rekindle.simulator.allocator._blocks import Block as Block
from rekindle.simulator.allocator._blocks import Pool as Pool
from rekindle.simulator.allocator._caching import CachingAllocator as CachingAllocator
from rekindle.simulator.allocator._caching import rounded as rounded
from rekindle.simulator.allocator._expandable import Expandable as Expandable
from rekindle.simulator.allocator._native import Native as Native
from rekindle.simulator.allocator._pages import Pages as Pages
from rekindle.simulator.allocator._window import Choice as Choice
from rekindle.simulator.allocator._window import cheapest_release as cheapest_release
from rekindle.simulator.allocator._window import cheapest_window as cheapest_window
