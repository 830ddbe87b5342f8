"""Tests of `rekindle.estimate` against the measured memory of real steps."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from tests.helpers import combined, name_of
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.networks import GPT, Residual
from tests.pytorch.observed.moved import (
    OPTIMIZERS_THAT_MOVE,
    PROGRAMS,
    Program,
    layers_of_equal_size,
    trained,
)
from tests.pytorch.tracker import Tracker

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": torch.optim.Adam,
}
STATIC = [case for case in ALL_CASES if case.name != "mixture_of_experts"]


def parts(case: Case) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    """Return a model, its input, and a function that computes a loss of its output."""
    workload = case.build()
    model, batch = workload.model, workload.data(1)
    for module in model.modules():
        if isinstance(module, Residual):
            module.drop = 0.0  # no stochastic depth, with which each step would need other memory
    if case.name == "gan":
        return model.critic, batch, torch.mean
    x, target = batch
    if case.name == "unet":
        return model, x, lambda scores: F.binary_cross_entropy_with_logits(scores, target)
    if target.dim() == 1:
        return model, x, lambda scores: F.cross_entropy(scores, target)
    return model, x, lambda scores: F.cross_entropy(scores.flatten(0, 1), target.flatten())


def measured(
    model: nn.Module, call: Callable[[], Any], loss: Callable[[Any], Tensor], make: Optimizer | None
) -> list[int]:
    """Return the peaks of forward pass, backward pass and optimizer in a second step."""
    optimizer = make(model.parameters()) if make is not None else None
    with Tracker() as tracker:
        tracker.count([*model.parameters(), *model.buffers()])
        for _ in range(2):
            model.zero_grad()
            gc.collect()
            peaks = []
            tracker.peak = tracker.alive
            output = call()
            value = loss(output)
            peaks.append(tracker.peak)
            tracker.peak = tracker.alive
            value.backward()
            peaks.append(tracker.peak)
            del output, value
            tracker.peak = tracker.alive
            if optimizer is not None:
                optimizer.step()
                peaks.append(tracker.peak)
    return peaks


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((STATIC[0], name) for name in OPTIMIZERS),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in combined(STATIC[1:], [*OPTIMIZERS])
        ),
    ],
    ids=name_of,
)
def test_estimate_is_within_two_percent_of_measured_step(
    case: Case, name: str, record_property: Callable[[str, object], None]
) -> None:
    model, x, loss = parts(case)
    weights = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    estimate = rekindle.estimate(model, (x,), optimizer=OPTIMIZERS[name], loss=loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, weights, model.parameters()))
    peaks = measured(model, lambda: model(x), loss, OPTIMIZERS[name])
    assert [phase.name for phase in estimate.phases] == ["forward", "backward", "optimizer"]
    for phase, peak in zip(estimate.phases, peaks, strict=True):
        record_property(phase.name, phase.peak / peak)
        assert abs(phase.peak / peak - 1) < 0.02
        assert sum(phase.held.values()) == phase.peak
    assert abs(estimate.compare(max(peaks)).error) < 0.01
    assert estimate.assumed == ()


def test_estimate_with_existing_optimizer_counts_its_state() -> None:
    model, x, loss = parts(STATIC[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    estimate = rekindle.estimate(model, x, optimizer=optimizer, loss=loss)
    assert not optimizer.state
    made = rekindle.estimate(model, x, optimizer=torch.optim.AdamW, loss=loss)
    assert estimate == made
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    held = estimate.phases[2].held
    assert held["parameters"] == held["gradients"] == parameters
    assert 2 * parameters <= held["optimizer state"] <= 2 * parameters + 8 * 100
    loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    again = rekindle.estimate(model, x, optimizer=optimizer, loss=loss)
    assert again.peak == estimate.peak


@pytest.mark.slow
def test_estimate_of_huge_model_allocates_no_memory() -> None:
    with torch.device("meta"):
        model = GPT(vocabulary=50_000, width=8192, heads=64, layers=40, context=512)
        tokens = torch.empty(64, 512, dtype=torch.long)
    estimate = rekindle.estimate(model, tokens, optimizer=torch.optim.Adam)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert estimate.phases[2].held["parameters"] == parameters > 10**11
    assert estimate.peak > 4 * parameters
    assert estimate.fits("100TB")
    assert not estimate.fits("80GB")
    assert all(p.is_meta for p in model.parameters())


def test_estimate_of_model_on_meta_equals_that_of_real_model() -> None:
    sizes = {"vocabulary": 64, "width": 64, "heads": 4, "layers": 2, "context": 64}
    x = torch.randint(64, (4, 64))
    with torch.device("meta"):
        shape = GPT(**sizes)
    real = rekindle.estimate(GPT(**sizes), x)
    assert rekindle.estimate(shape, x.to("meta")) == real
    assert [phase.name for phase in real.phases] == ["forward", "backward"]
    assert str(real).startswith("peak ")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_estimate_of_hugging_face_model_is_close_to_real_step(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=256,
            vocab_size=500,
        )
        model = transformers.BertForMaskedLM(config)
    model.train()
    tokens = torch.randint(500, (4, 64))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    estimate = rekindle.estimate(model, inputs, optimizer=torch.optim.Adam)
    peaks = measured(model, lambda: model(**inputs), lambda o: o.loss, torch.optim.Adam)
    assert abs(estimate.compare(max(peaks)).error) < 0.01


def test_estimate_with_data_dependent_branch_states_assumption() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * 2 if y.sum() > 0 else y + 1

    estimate = rekindle.estimate(Choosing(), torch.randn(4, 8))
    (line,) = estimate.assumed
    assert "test_estimate.py" in line
    assert "test_estimate.py" in str(estimate)
    (moe,) = [case for case in ALL_CASES if case.name == "mixture_of_experts"]
    model, x, _ = parts(moe)
    with pytest.raises(rekindle.Unsupported, match="depends on its data"):
        rekindle.estimate(model, x)


def test_estimate_compared_with_real_run_shows_difference() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.randn(64, 256)
    estimate = rekindle.estimate(model, x)
    with rekindle.budget.unlimited() as run:
        output = model(x)
        output.sum().backward()
    comparison = estimate.compare(run)
    assert comparison.measured == run.peak
    assert abs(comparison.error) < 0.02
    assert f"{comparison.error:+.1%}" in str(comparison)


# -- the smallest budget if weights, gradients and optimizer state move to the host ---------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS_THAT_MOVE)
@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_estimated_budget_suffices_if_state_moves(
    program: Program, optimizer: str, tmp_path: Path
) -> None:
    model, batch = program()
    estimate = rekindle.estimate(
        model,
        batch,
        optimizer=OPTIMIZERS_THAT_MOVE[optimizer],
        loss=lambda output: output.square().mean(),
        swap="1GiB",
    )
    budget = estimate.smallest_budget
    assert budget is not None
    run = trained(program, optimizer, budget, tmp_path)
    assert run.peak <= budget < 0.75 * estimate.peak
    swapped = run.report().swapped
    assert swapped is not None
    assert swapped.host_peak <= estimate.host
    with pytest.raises(rekindle.OutOfBudget):
        trained(program, optimizer, int(budget / 1.25), tmp_path, split="never")


def test_estimate_without_swap_names_no_budget_for_moved_state() -> None:
    model, batch = layers_of_equal_size()
    estimate = rekindle.estimate(model, batch)
    assert estimate.smallest_budget is None
    assert estimate.host == 0
    assert "swap=" not in str(estimate)


def test_estimate_with_wrong_amount_of_swap_is_refused() -> None:
    model, batch = layers_of_equal_size()
    with pytest.raises(rekindle.InvalidBudget, match=r"rekindle\.estimate\(model, batch, swap="):
        rekindle.estimate(model, batch, swap="much")


def test_estimate_with_swap_shows_line_that_works(tmp_path: Path) -> None:
    model, batch = layers_of_equal_size()
    estimate = rekindle.estimate(model, batch, swap="1GiB")
    line = str(estimate).splitlines()[-1]
    assert "on the host" in line
    with eval(line.partition("host: ")[2], {"rekindle": rekindle}) as run:
        model(batch).sum().backward()
    assert run.peak <= run.budget


def test_estimate_calls_no_hook_and_moves_no_generator() -> None:
    drawing: Any = np.random  # the generator that programs use

    class Drops(nn.Module):
        """Leaves its layer out at random, as LayerDrop does."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            drawn = random.random() + drawing.rand() + torch.rand(()).numel()
            return self.layer(x) if drawn > 1 else x

    model, seen = Drops(), []
    model.layer.register_forward_hook(lambda module, args, output: seen.append(output))
    before = random.getstate(), drawing.get_state()[1].tolist(), torch.get_rng_state()
    rekindle.estimate(model, torch.ones(4, 8))
    assert seen == []
    assert random.getstate() == before[0]
    assert drawing.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
