"""Define the types of ids and quantities that all parts of the package share.

All these types are integers, so that comparisons are exact.
"""

from __future__ import annotations

from typing import NewType

StorageId = NewType("StorageId", int)
ValueId = NewType("ValueId", int)
OpId = NewType("OpId", int)

Bytes = int
Nanoseconds = int
