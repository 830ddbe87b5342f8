"""Train a causal language model from scratch with `Trainer`, like transformers' `run_clm.py`."""

import logging
import math
import sys
from dataclasses import dataclass, field

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    n_layer: int = field(default=3, metadata={"help": "Blocks."})
    n_embd: int = field(default=48)


@dataclass
class DataTrainingArguments:
    block_size: int = field(default=32)
    max_train_samples: int = field(default=96)


class Blocks(torch.utils.data.Dataset):
    """Blocks of text as token ids, one token for each character."""

    def __init__(self, first, last, size):
        text = (transformers.__doc__ or "") + "to be or not to be, that is the question. " * 400
        tokens = torch.tensor([ord(character) % 128 for character in text])
        self.blocks = [tokens[at * size : (at + 1) * size] for at in range(first, last)]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index].clone()}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(
        format="%(name)s - %(message)s", handlers=[logging.StreamHandler(sys.stdout)]
    )
    logger.setLevel(logging.INFO)
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=128, n_positions=64, n_head=4, n_layer=model_args.n_layer,
        n_embd=model_args.n_embd, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    logger.info(f"Training new model from scratch - Total size={model.num_parameters()} params")
    most = data_args.max_train_samples

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(dim=-1)

    def compute_metrics(found):
        right = found.predictions[:, :-1] == found.label_ids[:, 1:]
        return {"accuracy": float(right.mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Blocks(0, most, data_args.block_size),
        eval_dataset=Blocks(most, most + 24, data_args.block_size),
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
