"""List known defects, which the hunt (a search for failing random loops) does not report again.

Each row names a part of a loop and the complaint that it causes. Remove the row when the defect is
fixed: `scripts/sweep hunt --known` also reports the listed defects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.differ.judge import Complaint


class Known(NamedTuple):
    """A known defect.

    Attributes:
        part: Regular expression for one of `Loop.parts`.
        text: Regular expression for the mode and the complaint.
        reason: Why it is not repaired.
    """

    part: str
    text: str
    reason: str


PEAK = "peak"
UNDONE = "a step that is undone is over the budget"
KNOWN: tuple[Known, ...] = (
    Known(
        "block scripted",
        "TorchScript interpreter",
        "OutOfBudget inside nested TorchScript is a bare RuntimeError",
    ),
    Known(
        "block embedding_sparse",
        "bytes grow with every step",
        "SGD appends each sparse gradient to its momentum buffer, in plain PyTorch as well",
    ),
    Known("driver (closure|line search)", PEAK, UNDONE),
    Known("block embedding_sparse", "refused, with a peak", UNDONE),
    Known(
        "block (lstm|packed)",
        PEAK,
        "the workspace of oneDNN's LSTM is known only after its first run",
    ),
    Known(
        "driver rollout|habit (another default type|input from a buffer|best so far|weighted)"
        "|block (selected|put|listed|numpy|frombuffer|dlpack|pickled|custom_op)",
        PEAK,
        "a tensor made from data of Python or NumPy has its memory before Rekindle sees it",
    ),
    Known(
        "block embedding_bag",
        PEAK,
        "its meta kernel has memory for one offset less than the real one, in the first call",
    ),
)


def why_known(parts: Iterable[str], found: Complaint) -> str:
    """Return the reason why a loop of `parts` has this complaint if it is known, or ""."""
    text = f"{found.mode}: {found.text}"
    for row in KNOWN:
        if re.search(row.text, text) and any(re.match(row.part, part) for part in parts):
            return row.reason
    return ""
