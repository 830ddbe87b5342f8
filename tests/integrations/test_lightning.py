"""Tests that Lightning trains to the same weights within a budget, and ends the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle

lightning = pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # warnings of Lightning itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)]
        self.network = torch.nn.Sequential(*blocks, torch.nn.Dropout(0.1))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        (x,) = batch
        return (self.network(x) - x).square().mean()

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("validation", self.network(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(callbacks: list[Any]) -> Autoencoder:
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(512, 64))
    loader = torch.utils.data.DataLoader(data, batch_size=128)
    trainer = lightning.Trainer(
        max_epochs=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    model = Autoencoder()
    trainer.fit(model, loader, loader)
    return model


def test_lightning_within_budget_matches_pytorch() -> None:
    from rekindle.integrations.lightning import Budget

    plain = fit([])
    roomy = Budget("1TiB")
    fit([roomy])
    assert roomy.run is not None
    tight = Budget(roomy.run.peak * 8 // 10)
    model = fit([tight])
    assert tight.run is not None
    assert tight.run.recomputations > 0
    assert tight.run.peak <= roomy.run.peak * 8 // 10
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_lightning_callback_logs_evictions_after_each_batch() -> None:
    from rekindle.integrations.lightning import Budget

    class Seen(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):  # type: ignore[no-untyped-def]
            figures.append({name: float(x) for name, x in trainer.callback_metrics.items()})

    figures: list[dict[str, float]] = []
    roomy = Budget("1TiB")
    fit([roomy])
    assert roomy.run is not None
    tight = Budget(rekindle.budget(roomy.run.peak * 8 // 10, policy="lru", learn="wait"))
    fit([tight, Seen()])
    assert tight.run is not None
    assert tight.run.policy == rekindle.policies.LRU()
    assert sum(each["rekindle/evictions"] for each in figures) == tight.run.evictions > 0
    assert all(0 <= each["rekindle/time_lost_percent"] < 1000 for each in figures)
    fit([tight])  # the same callback is used a second time
    with pytest.raises(rekindle.InvalidBudget):
        Budget("6 Gigs")


def test_exception_in_lightning_ends_budget() -> None:
    from rekindle.integrations.lightning import Budget

    with pytest.raises(rekindle.OutOfBudget):
        fit([Budget("64KiB")])
    with rekindle.budget("1GiB"):  # a budget inside another one would be refused
        torch.ones(3).add(1)
