"""Tests of PyTorch's meta kernels in C++, which predict the sizes of results at first calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.pytorch.native import core, why_not
from tests.helpers import own_cache

pytestmark = pytest.mark.skipif(core() is None, reason=f"no native core: {why_not()}")

PROGRAM = """
import sys
import torch
import rekindle

torch.manual_seed(0)
cell = torch.nn.LSTMCell(32, 32)
words, out = torch.nn.Embedding(20, 32), torch.nn.Linear(32, 20)
batch, wanted = torch.randint(20, (40, 16)), torch.randint(20, (40, 16))
with rekindle.budget("600KiB", learn=False) as run:
    hidden = memory = torch.zeros(16, 32)
    states = []
    for each in batch:
        hidden, memory = cell(words(each), (hidden, memory))
        states.append(hidden)
    scores = out(torch.stack(states))
    torch.nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten()).backward()
assert run.evictions > 0, run
print("sympy" in sys.modules)
"""


def test_first_budget_of_small_program_imports_no_sympy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's meta kernels in Python import SymPy, which takes half a second."""
    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path)))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "False\n", ended.stderr
