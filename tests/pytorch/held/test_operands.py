"""`evict="anything"`: all that an operator reads is there at once, and stays until it has run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import rekindle
from tests.pytorch.harsh import harshest
from tests.pytorch.sweep import _everything

Step = Callable[[], object]


def test_spectral_norm() -> None:
    """Its power iteration reads what it has just normalized together with what that came from."""

    def program() -> Step:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(layer.parameters(), 0.05)
        x = torch.rand(4, 16)

        def step() -> object:
            loss = torch.zeros(())
            for _ in range(2):
                loss = layer(layer(x)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss, layer

        return step

    harshest(program, evict="anything")


def test_what_came_back_on_the_way_to_another_stays() -> None:
    """There is room for three vectors: `a` comes back for `c`, and must not go again for it."""
    nbytes = 4 * 1_000
    with torch.no_grad(), rekindle.budget(3 * nbytes, evict="anything") as run:
        a = torch.ones(1_000) * 2
        b = a.exp()
        c = b.neg()
        _everything.let_go(run)
        total = c + a
        run._driver.engine.check()
    assert torch.equal(total, 2 - b)
