"""What is not asked of every sample, and why. An entry that is not needed any more fails.

Each exception is shown by one case: tests run it, and it has to go as said.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Exempt(NamedTuple):
    """Cases of an entry may go as `kind` says, not "same"."""

    kind: str
    shown_by: str  #: name of a case that goes so
    reason: str


#: Memory without content is not the same twice; PyTorch can be told to fill it.
WITHOUT_CONTENT = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


@contextmanager
def filled(entry: str) -> Iterator[None]:
    """Where `entry` makes memory without content, it is filled."""
    if entry not in WITHOUT_CONTENT:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


#: Entries that PyTorch refuses on this machine, whatever the sample.
NOT_HERE = {
    "jiterator_2inputs_2outputs": "for GPUs only",
    "jiterator_4inputs_with_extra_args": "for GPUs only",
    "jiterator_binary": "for GPUs only",
    "jiterator_binary_return_by_ref": "for GPUs only",
    "jiterator_unary": "for GPUs only",
}

#: Entries of which no sample has anything to recompute.
NOTHING_TO_RECOMPUTE = {}

OPINFO: dict[str, Exempt] = {}
MODULES: dict[str, Exempt] = {}
OPTIMIZERS: dict[str, Exempt] = {}
