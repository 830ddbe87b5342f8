"""Tests of libraries that catch a device OOM, and retry with a smaller batch or skip the batch.

They must do so for `OutOfBudget` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle

WIDTH = 64
BUDGET = 400_000  #: enough for 64 rows, but not for 256


class Stack(nn.Module):
    """Layers whose results the program holds, so that a batch of many rows cannot fit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x).tanh()
            kept.append(x.detach())
        return x.square().mean() + 0 * torch.stack(kept).sum()


def steps_of(model: nn.Module) -> Callable[[int], int]:
    def step(batch_size: int) -> int:
        model.zero_grad()
        with rekindle.budget(BUDGET):
            model(torch.ones(batch_size, WIDTH)).backward()
        return batch_size

    return step


def test_accelerate_finds_smaller_batch_after_out_of_budget() -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    step = steps_of(Stack())
    assert memory.find_executable_batch_size(step, starting_batch_size=256)() < 64


def test_lightning_and_accelerate_treat_out_of_budget_as_oom() -> None:
    theirs = pytest.importorskip("lightning.pytorch.utilities.memory")
    memory = pytest.importorskip("accelerate.utils.memory")
    with pytest.raises(rekindle.OutOfBudget) as caught:
        steps_of(Stack())(256)
    assert theirs.is_oom_error(caught.value)
    assert memory.should_reduce_batch_size(caught.value)


def test_fairseq_loop_skips_batch_that_raises_out_of_budget() -> None:
    """`fairseq.trainer` skips a batch on a `RuntimeError` whose text contains "out of memory"."""
    step, skipped = steps_of(Stack()), []
    for batch_size in (8, 256, 8):
        try:
            step(batch_size)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            skipped.append(batch_size)
    assert skipped == [256]


def test_detectron2_style_retry_halves_batch_after_out_of_budget() -> None:
    """`detectron2.utils.memory.retry_if_cuda_oom` looks for "CUDA out of memory. " in the text."""
    step, tried = steps_of(Stack()), []

    def attempt(batch_size: int) -> int:
        tried.append(batch_size)
        try:
            return step(batch_size)
        except RuntimeError as error:
            if "CUDA out of memory. " not in str(error):
                raise
            return attempt(batch_size // 2)

    assert attempt(512) == tried[-1] < 512
    assert tried[:2] == [512, 256]


def test_except_torch_out_of_memory_error_catches_out_of_budget() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        steps_of(Stack())(256)
    with pytest.raises(MemoryError):
        steps_of(Stack())(256)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the library itself
def test_trainer_finds_smaller_batch_after_out_of_budget(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from rekindle.integrations.huggingface import WithinBudget

    class BudgetTrainer(WithinBudget, transformers.Trainer):
        pass

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 512

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.full((WIDTH,), float(index))}

    class Model(Stack):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            sizes.append(len(x))
            return {"loss": super().forward(x)}

    sizes: list[int] = []
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=256,
        auto_find_batch_size=True,
        report_to=[],
        save_strategy="no",
        optim="sgd",
        use_cpu=True,
        disable_tqdm=True,
    )
    BudgetTrainer(Model(), arguments, train_dataset=Rows(), budget=BUDGET).train()
    assert sizes[0] == 256
    assert sizes[-1] < 128


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the library itself
def test_lightning_batch_size_finder_stops_at_budget(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    tuning = pytest.importorskip("lightning.pytorch.tuner.tuning")

    class Rows(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 4_096

        def __getitem__(self, index: int) -> Tensor:
            return torch.full((WIDTH,), float(index))

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.stack = 2, Stack()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Rows(), batch_size=self.batch_size)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.stack(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = Module()
    with rekindle.budget(BUDGET):
        found = tuning.Tuner(trainer).scale_batch_size(module, mode="power", steps_per_trial=2)
    assert found is not None
    assert 2 <= found <= 64
