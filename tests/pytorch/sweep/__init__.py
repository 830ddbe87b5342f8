"""Run PyTorch's own test databases within a budget: every operator, module and optimizer.

    scripts/sweep opinfo                        # all operators, in two processes
    scripts/sweep modules --only Transformer
    scripts/sweep opinfo --shard 3/8 --few 2  # an eighth of the entries, two samples of each

Each sample runs in plain PyTorch, and then with everything evicted after every operator, so that
everything is recomputed. `_sample` compares the results bit for bit. `_exceptions` lists known
differences with reasons; an entry for a sample that does not differ is reported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.pytorch.sweep._verdict import Entries

DATABASES = ("opinfo", "modules", "optimizers")


def entries_of(database: str) -> Entries:
    return import_module(f"tests.pytorch.sweep.{database}").entries()
