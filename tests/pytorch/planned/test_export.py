"""Tests of `rekindle.export`, which writes a plan as plain `torch.utils.checkpoint` calls."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from tests.pytorch.chains.helpers import Block
from tests.pytorch.tracker import Tracker


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))
        self.out = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def made() -> tuple[Model, Callable[[], None]]:
    """Return a model after one step, and its next step."""
    torch.manual_seed(5)
    model, x = Model(), torch.randint(64, (4, 64))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()

    step()
    return model, step


def run(model: nn.Module, step: Callable[[], None]) -> tuple[list[Tensor], int]:
    torch.manual_seed(6)
    model.zero_grad()
    gc.collect()
    with Tracker() as tracker:
        tracker.count([*model.parameters()])
        step()
    return [p.grad.clone() for p in model.parameters()], tracker.peak


@pytest.mark.slow
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("fraction", [0.8, 0.55])
def test_exported_checkpoints_match_pytorch_within_budget(fraction: float, selective: bool) -> None:
    model, step = made()
    wanted, plain = run(model, step)
    budget = int(fraction * plain)
    export = rekindle.export(model, step, budget, selective=selective)
    assert export.fits
    assert 0 < len(export.blocks) <= 6
    undo = export.apply(model)
    got, peak = run(model, step)
    assert all(map(torch.equal, got, wanted))
    assert peak < plain
    assert peak <= budget
    assert abs(export.peak / peak - 1) < 0.1
    undo()
    assert run(model, step)[1] == plain
    again = pickle.loads(pickle.dumps(export))
    again.apply(model)
    assert run(model, step)[1] == peak


def test_export_with_selective_true_recomputes_less() -> None:
    model, step = made()
    _, plain = run(model, step)
    whole = rekindle.export(model, step, int(0.7 * plain))
    saving = rekindle.export(model, step, int(0.7 * plain), selective=True)
    assert any(saving.blocks.values())
    assert saving.recompute_ns / saving.compute_ns < whole.recompute_ns / whole.compute_ns


def test_exported_code_has_same_results_as_export_apply() -> None:
    model, step = made()
    _, plain = run(model, step)
    export = rekindle.export(model, step, int(0.6 * plain))
    export.apply(model)
    wanted = run(model, step)
    fresh, step = made()
    exec(export.code(), {"model": fresh})
    got = run(fresh, step)
    assert got[1] == wanted[1]
    assert "rekindle" not in export.code()
    assert [*fresh.state_dict()] == [*copy.deepcopy(model).state_dict()]
    model, step = made()
    selective = rekindle.export(model, step, int(0.7 * plain), selective=True)
    with pytest.raises(rekindle.Unsupported, match=r"\.apply\(model\)"):
        selective.code()


def test_export_that_cannot_fit_into_budget_reports_excess() -> None:
    model, step = made()
    export = rekindle.export(model, step, "1MB")
    assert not export.fits
    assert export.excess == export.peak - 1_000_000 > 0
    assert export.peak < 0.6 * export.keep_all_peak
    assert "over it" in str(export)


def test_export_checkpoints_only_needed_or_listed_blocks() -> None:
    model, step = made()
    assert rekindle.export(model, step, "1GB").blocks == {}
    named = rekindle.export(model, step, "1MB", blocks=["blocks.0", "blocks.3.mlp"])
    assert {*named.blocks} == {"blocks.0", "blocks.3.mlp"}
    with pytest.raises(rekindle.Unsupported, match=r"blocks\.9 did not run"):
        rekindle.export(model, step, "1MB", blocks=["blocks.9"])
    line = nn.Linear(3, 3)
    with pytest.raises(rekindle.Unsupported, match=r"no nn\.ModuleList and no nn\.Seq"):
        rekindle.export(line, lambda: line(torch.randn(2, 3)).sum().backward(), "1MB")


@pytest.mark.parametrize("selective", [False, True])
def test_exported_encoder_with_dropout_matches_pytorch(selective: bool) -> None:
    torch.manual_seed(5)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(6)
    ]
    model, x = nn.Sequential(*layers), torch.randn(4, 64, 64)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    wanted, plain = run(model, step)
    budget = int(0.6 * plain)
    export = rekindle.export(model, step, budget, selective=selective)
    assert export.fits
    export.apply(model)
    got, peak = run(model, step)
    assert all(map(torch.equal, got, wanted))
    assert peak <= budget
