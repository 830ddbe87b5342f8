"""Tests that recording a step creates no Python object for each autograd node.

PyTorch frees a graph whose nodes have Python objects by recursion. In a long graph that overflows
the thread's stack. Each program runs in a process of its own, in a thread with a small stack.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
import torch, rekindle
from tests.pytorch.rehearsed.test_tracer import on_shapes

def step():
    x = w = torch.ones(2, requires_grad=True)
    for _ in range(1_500):
        x = x * w
    x.sum().backward()

class Loop(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        for _ in range(1_500):
            x = x * self.weight
        return x

def observed():
    with rekindle.budget("1GiB", record=True):
        step()

def run():
    {call}
    print("done")

threading.stack_size(256 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    "call",
    ["rekindle.capture(step)", "observed()", "on_shapes(Loop(), torch.ones(2))"],
)
def test_recording_of_long_graph_frees_it_without_recursion(call: str) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("{call}", call)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "done\n", result.stderr
