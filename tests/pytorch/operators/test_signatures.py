"""Tests of operator signatures: calls with the same signature have results of the same size.

So Rekindle computes the size once and caches it.
"""

from __future__ import annotations

import torch

from rekindle.pytorch.operators import Invocation, operator, signature_of


def test_result_sizes_are_cached_for_cpu_and_device_separately() -> None:
    sin = operator(torch.ops.aten.sin.default)
    key = Invocation(sin, (torch.rand(8, 125),), {}).key
    device = torch.device("cuda", 0)
    beside, there = signature_of(sin, key, (device, False)), signature_of(sin, key, (device, True))
    assert (beside.predict([]), there.predict([])) == (4_000, 4_096)
    assert signature_of(sin, key, (device, True)) is there
    assert signature_of(sin, key, (torch.device("cuda", 1), True)) is not there
