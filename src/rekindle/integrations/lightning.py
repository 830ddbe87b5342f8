"""Lightning's `Trainer` within a memory budget: `Trainer(callbacks=[Budget("20GiB")])`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rekindle.integrations._figures import Amount, Figures, entered
from rekindle.pytorch import Run


class Budget(Callback):
    """A callback for Lightning's `Trainer`: training runs within a budget.

    It logs for each batch `rekindle/peak_bytes`, `rekindle/evictions`, `rekindle/recomputations`
    and `rekindle/time_lost_percent`.

    Args:
        budget: Bytes, or text ("20GiB"), for all of training, validation included. For other
            options, a `rekindle.budget("20GiB", learn=True, ...)`.

    Attributes:
        run: The `Run` of the training.

    Example:
        ```python
        Trainer(callbacks=[Budget("20GiB")])
        ```
    """

    def __init__(self, budget: Amount) -> None:
        entered(budget)  # An invalid budget raises here, not when training starts.
        self.budget = budget
        self._figures: Figures | None = None
        self.run: Run | None = None
        self._stack = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run = self._stack.enter_context(entered(self.budget))
        self._figures = Figures(self.run)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._figures is not None:
            pl_module.log_dict(self._figures.since_last("rekindle/"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stack.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stack.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stack.close()
