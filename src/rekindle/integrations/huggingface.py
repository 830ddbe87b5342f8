"""Hugging Face's `Trainer` within a memory budget.

    class BudgetTrainer(WithinBudget, Trainer): ...
    trainer = BudgetTrainer(model, args, train_dataset=data, budget="20GiB")

A mixin, because callbacks of the `Trainer` are told of steps and cannot wrap them.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rekindle.integrations._figures import Amount, Figures, entered
from rekindle.pytorch import Run


class WithinBudget:
    """Put before `Trainer` among the bases: `train()` runs within `budget`.

    budget: bytes, as an int or as text ("20GiB"), for all of training: parameters, gradients,
        optimizer state, batches, activations, evaluations in between. With other options: a
        `rekindle.budget("20GiB", learn=True, ...)`. None: without one.

    `run` is the `rekindle.budget(...)` of the last `train()`; what it did is logged with the losses
    (`BudgetLog`). Leave gradient checkpointing off: what fits is not computed twice.
    """

    run: Run | None = None

    def __init__(self, *args: Any, budget: Amount | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = budget

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. Raises `OutOfBudget` if the budget cannot be kept."""
        base: Any = super()
        if self.budget is None:
            return base.train(*args, **kwargs)
        with entered(self.budget) as self.run:
            log = BudgetLog(self.run)
            trainer: Any = self
            callbacks = trainer.callback_handler.callbacks
            callbacks.insert(0, log)  # before those that print and send
            try:
                return base.train(*args, **kwargs)
            finally:
                callbacks.remove(log)


class BudgetLog(TrainerCallback):
    """Adds to what is logged: the peak so far (bytes); since the last log, evictions, operators
    that ran again, and the time lost (percent of the computation)."""

    def __init__(self, run: Run) -> None:
        self._figures = Figures(run)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        figures = self._figures.since_last("rekindle_")
        if logs is not None:
            logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)
