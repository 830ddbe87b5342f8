"""Lightning's `Trainer` within a memory budget.

Trainer(callbacks=[Budget("20GiB")])
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rekindle.pytorch import Run
from rekindle.pytorch import budget as within


class Budget(Callback):
    """Training from its start to its end, or to an exception, runs within `budget`.

    budget: bytes, as an int or as text ("20GiB"): parameters, gradients, optimizer state, batches,
        activations, validation in between.

    Logs `rekindle/peak_bytes` and `rekindle/time_lost` (share of the computation) for each batch;
    `run` says more.
    """

    def __init__(self, budget: str | int) -> None:
        self.budget = budget
        self.run: Run | None = None
        self._stack = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run = self._stack.enter_context(within(self.budget))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.run is not None:
            share = self.run.recompute_ns / max(1, self.run.compute_ns)
            pl_module.log("rekindle/peak_bytes", float(self.run.peak))
            pl_module.log("rekindle/time_lost", share)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stack.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stack.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stack.close()
