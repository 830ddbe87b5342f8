"""Hugging Face's Trainer within a budget. python examples/huggingface_trainer.py"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from rekindle.integrations.huggingface import WithinBudget


class BudgetTrainer(WithinBudget, Trainer):
    pass


class Words(torch.utils.data.Dataset):
    """A data set of 64 random token sequences, which needs no download."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(100, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


set_seed(0)
config = GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=6, n_head=4)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(config)
    trainer = BudgetTrainer(model, arguments, train_dataset=Words(), budget="16MiB")
    trainer.train()

print(trainer.run.report())
