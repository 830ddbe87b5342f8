"""Hugging Face's `Trainer` within a memory budget.

    class BudgetTrainer(WithinBudget, Trainer): ...
    trainer = BudgetTrainer(model, args, train_dataset=data, budget="20GiB")

`WithinBudget` is a mixin, because a callback of `Trainer` cannot wrap the training loop.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rekindle.integrations._figures import Amount, Figures, entered
from rekindle.pytorch import Run


class WithinBudget:
    """A mixin for `transformers.Trainer`: `train()` runs within a budget.

    Put the mixin before `Trainer` among the bases. Leave gradient checkpointing off, because it
    recomputes blocks even if they fit. The figures of the run are logged with the losses.

    Args:
        budget: Bytes, or text ("20GiB"), for all of training, evaluations included. For other
            options, a `rekindle.budget("20GiB", learn=True, ...)`. None: no budget.

    Attributes:
        run: The `Run` of the last `train()`.

    Example:
        ```python
        class BudgetTrainer(WithinBudget, Trainer): ...

        trainer = BudgetTrainer(model, args, train_dataset=data, budget="20GiB")
        ```
    """

    run: Run | None = None

    def __init__(self, *args: Any, budget: Amount | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = budget

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as `Trainer.train` does.

        Raises:
            OutOfBudget: An operator does not fit into the budget.
        """
        base: Any = super()
        if self.budget is None:
            return base.train(*args, **kwargs)
        with entered(self.budget) as self.run:
            log = BudgetLog(self.run)
            trainer: Any = self
            callbacks = trainer.callback_handler.callbacks
            # This callback must run before the callbacks that print and send the log.
            callbacks.insert(0, log)
            try:
                return base.train(*args, **kwargs)
            finally:
                callbacks.remove(log)


class BudgetLog(TrainerCallback):
    """A callback that adds the figures of a run to the log. `WithinBudget` installs it.

    The names are `rekindle_peak_bytes`, `rekindle_evictions`, `rekindle_recomputations` and
    `rekindle_time_lost_percent`.

    Args:
        run: The run of the training.
    """

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
