"""Small random batches for the networks of the zoo (`architectures`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Batch = Mapping[str, Any]
WORDS = 96  # size of the vocabulary
SENTENCES, LENGTH = 4, 48


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(4, WORDS, (SENTENCES, length))


def text() -> Batch:
    words = ids()
    return {"input_ids": words, "labels": words.clone()}


def short_text() -> Batch:
    words = ids(20)
    return {"input_ids": words, "labels": words.clone()}


def padded_text() -> Batch:
    """Return sentences of different lengths, padded to one length."""
    words = ids()
    lengths = torch.tensor([LENGTH, LENGTH // 2, LENGTH // 3, LENGTH - 5])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def translation() -> Batch:
    return {"input_ids": ids(), "labels": ids(LENGTH // 2)}


def picture(size: int = 32) -> Callable[[], Batch]:
    return lambda: {
        "pixel_values": torch.randn(SENTENCES, 3, size, size),
        "labels": torch.randint(0, 2, (SENTENCES,)),
    }


def pixels(size: int = 32, channels: int = 3) -> Callable[[], Batch]:
    return lambda: {"pixel_values": torch.randn(SENTENCES, channels, size, size)}


def captioned(size: int = 32) -> Callable[[], Batch]:
    return lambda: {
        "input_ids": ids(16),
        "attention_mask": torch.ones(SENTENCES, 16, dtype=torch.long),
        "pixel_values": torch.randn(SENTENCES, 3, size, size),
    }


def sound() -> Batch:
    return {"input_values": torch.randn(SENTENCES, 2_000)}


def spectrogram() -> Batch:
    return {"input_features": torch.randn(SENTENCES, 16, 60), "labels": ids(12)}


def forecast() -> Batch:
    past = 24 + 7  # length of the context and the longest lag
    return {
        "past_values": torch.rand(SENTENCES, past),
        "past_time_features": torch.rand(SENTENCES, past, 1),
        "past_observed_mask": torch.ones(SENTENCES, past),
        "future_values": torch.rand(SENTENCES, 8),
        "future_time_features": torch.rand(SENTENCES, 8, 1),
    }


def clip() -> Batch:
    return {**captioned()(), "return_loss": True}


def video() -> Batch:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.tensor([0, 1])}


def spoken() -> Batch:
    return {"input_values": torch.randn(SENTENCES, 2_000), "labels": ids(8)}


def decisions() -> Batch:
    steps = (SENTENCES, 12)
    return {
        "states": torch.randn(*steps, 5),
        "actions": torch.randn(*steps, 3),
        "rewards": torch.randn(*steps, 1),
        "returns_to_go": torch.randn(*steps, 1),
        "timesteps": torch.arange(12).repeat(SENTENCES, 1),
    }


def segments() -> Batch:
    return {
        "pixel_values": torch.randn(SENTENCES, 3, 32, 32),
        "labels": torch.randint(0, 2, (SENTENCES, 32, 32)),
    }
