"""Tests that `Trainer` within a budget trains to the same weights and logs memory figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # warnings of transformers itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(50, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(folder: Path, budget: Any) -> Any:
    from rekindle.integrations.huggingface import WithinBudget

    class BudgetTrainer(WithinBudget, transformers.Trainer):
        pass

    transformers.set_seed(0)
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=50, loss_type="ForCausalLM", **sizes)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = transformers.GPT2LMHeadModel(config)
    trainer = BudgetTrainer(model, arguments, train_dataset=Words(), budget=budget)
    trainer.train()
    return trainer


def test_trainer_within_budget_matches_pytorch(tmp_path: Path) -> None:
    plain = train(tmp_path, None)
    roomy = train(tmp_path, "1TiB")
    budget = roomy.run.peak * 6 // 10
    tight = train(tmp_path, budget)
    assert tight.run.recomputations > 0
    assert tight.run.peak <= budget
    for one, other in zip(plain.model.parameters(), tight.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_trainer_logs_peak_and_time_lost_and_removes_callback(tmp_path: Path) -> None:
    trainer = train(tmp_path, "1TiB")
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    assert all(entry["rekindle_peak_bytes"] > 0 for entry in steps)
    assert all(entry["rekindle_time_lost_percent"] == 0 for entry in steps)
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert "BudgetLog" not in names


def test_trainer_log_entry_covers_steps_since_previous_entry(tmp_path: Path) -> None:
    roomy = train(tmp_path, "1TiB")
    trainer = train(tmp_path, rekindle.budget(roomy.run.peak * 6 // 10, policy="dtr"))
    logged = [entry for entry in trainer.state.log_history if "rekindle_evictions" in entry]
    assert trainer.run.policy == rekindle.policies.DTR()
    assert sum(entry["rekindle_evictions"] for entry in logged) <= trainer.run.evictions
    assert logged[1]["rekindle_recomputations"] < trainer.run.recomputations


def test_trainer_with_each_budget_option_matches_pytorch(tmp_path: Path) -> None:
    roomy = train(tmp_path, "1TiB")
    budget = roomy.run.peak * 6 // 10
    options = {"learn": "wait", "policy": "lru", "record": True, "cache": False}
    learned = train(tmp_path, rekindle.budget(budget, **options))
    assert learned.run.policy == rekindle.policies.LRU()
    assert learned.run.record.actions
    assert "steps planned" in str(learned.run.report())
    swapped = train(tmp_path, rekindle.budget(budget, swap="1GiB", swap_directory=tmp_path))
    assert swapped.run.report().swapped is not None
    anything = train(tmp_path, rekindle.budget(budget, evict="anything"))
    runs = (learned, swapped, anything)
    expected = train(tmp_path, None).model.state_dict()
    for each in runs:
        assert each.run.budget == budget >= each.run.peak
        found = each.model.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_out_of_budget_in_trainer_ends_budget(tmp_path: Path) -> None:
    with pytest.raises(rekindle.OutOfBudget):
        train(tmp_path, "64KiB")
    with rekindle.budget("1GiB"):  # a budget inside another one would be refused
        torch.ones(3).add(1)
